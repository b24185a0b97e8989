"""The synthetic world of the embedded model: coloured signs with a word and a shape.

An image has 4 x 4 cells of 32 pixels. One row contains the word, one letter per cell; a block of 2
x 2 cells contains the shape; the rest is blank. All cells of a sign share one pair of colours.
There are 8 colour pairs x (26 letters + 3 shapes x 4 quadrants + blank) = 312 distinct cells, so a
codebook of 512 entries can represent every image without loss.

Drawing is a table look-up: every cell is drawn only once, with Pillow's bundled font.
"""

from __future__ import annotations

import functools
import re
import string
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from glm_grpo.errors import ConfigError

CELL = 32
GRID = 4
SIZE = CELL * GRID

LETTERS = string.ascii_uppercase
SHAPES = ("circle", "square", "triangle")
COLOURS = {
    "red": (200, 30, 40),
    "blue": (30, 60, 180),
    "green": (20, 120, 60),
    "black": (20, 20, 25),
    "white": (245, 245, 240),
    "yellow": (250, 215, 40),
}
# (foreground, background), with enough contrast for OCR.
COLOUR_PAIRS = (
    ("white", "red"),
    ("white", "blue"),
    ("white", "green"),
    ("yellow", "black"),
    ("red", "white"),
    ("blue", "yellow"),
    ("black", "white"),
    ("black", "yellow"),
)
COLOUR_NAMES = tuple(f"{foreground} on {background}" for foreground, background in COLOUR_PAIRS)
CAPTION_FORM = 'COLOURS: a SHAPE above|below the word "WORD"'
"""Form of all captions; COLOURS is one of `COLOUR_NAMES`, SHAPE of `SHAPES`, WORD 3 or 4
capitals."""
WORD_PATTERN = "[A-Z]{3,4}"
_CAPTION = re.compile(
    f'({"|".join(COLOUR_NAMES)}): a ({"|".join(SHAPES)}) (above|below) the word "{WORD_PATTERN}"'
)
KINDS = len(LETTERS) + 4 * len(SHAPES) + 1
BLANK = KINDS - 1
NUM_CELLS = KINDS * len(COLOUR_PAIRS)

# Real words make the galleries readable. The split is fixed: HELD_OUT_WORDS occur neither in
# pre-training captions (random letter strings without them) nor in training prompts.
TRAINING_WORDS = tuple(
    """ACE ACID ALSO ARCH AREA ARM ATOM AUNT BABY BACK BAND BANK BARN BEAM BEAR BELT BIRD BLUE BOAT
    BODY BOLD BOOK BOWL BULB BUSH CAFE CAKE CALM CAMP CARD CASH CAVE CHEF CITY CLAY CLUB COAL COAT
    CODE COOK CORN CREW CUBE CURL DATE DAWN DEER DESK DISH DOCK DOG DOOR DOVE DRUM DUCK DUNE DUST
    EAR EAST ECHO EDGE EGG EXAM EYE FAN FARM FERN FILM FIRE FISH FLAG FOAM FOG FOLK FORK FOX FROG
    FUEL GAME GATE GIFT GOAT GOLD GOLF GULF HALF HAND HARP HAWK HEAT HERO HILL HOME HOOK HOPE HORN
    HOUR ICE IDEA INK IRON IVY JAM JAZZ JOIN JUDO JUMP KEEN KELP KEY KICK KIND KING LAB LACE LAKE
    LAMB LAMP LAND LAVA LEAF LID LIME LINE LION LOAF LOCK LOOP LUCK MAIL MAP MASK MAZE MEAL MILK
    MINT MOON MOSS MUD MUG NAIL NECK NEST NET NOON NOSE NOTE OAK OAT OIL ORCA OVAL OVEN OWL PALM
    PARK PATH PEAR PIER PINE PLUM POET POND PORT QUAY QUIZ RAFT RAIN RICE RING ROAD ROOF ROSE RUBY
    RUG SAIL SALT SAND SEED SHIP SHOE SILK SKY SNOW SOAP SOIL SONG SOUP STAR SUN SURF SWAN TAXI TEA
    TENT TIDE TILE TOAD TOY TREE TUBE TUNA TWIG URN VASE VEST VINE VOW WASP WAVE WAX WELL WEST WIND
    WING WOLF WOOD WOOL YAK YARD YARN YOLK ZERO ZINC ZONE ZOO""".split()  # noqa: SIM905 - as a list it would fill four screens
)
HELD_OUT_WORDS = tuple(
    """OPEN STOP EXIT WAIT KITE MENU SHOP SALE PUB FREE BUS GYM VIEW QUIT HELP ZEN BIKE NEWS
    DIVE WIFI COLD FUN HAT LOUD JURY VAN BOX PIG CUP ROCK DUSK GLOW MYTH SPY FLEX HUB KNOT VEIL
    OXEN WORK TRAM""".split()  # noqa: SIM905 - as above
)


@dataclass(frozen=True)
class Sign:
    """One image of the world.

    Attributes:
        word: 3 or 4 capital letters.
        shape: One of `SHAPES`.
        colours: Index into `COLOUR_PAIRS`.
        is_word_above: Whether the word is above the shape.
    """

    word: str
    shape: str
    colours: int
    is_word_above: bool


def caption(sign: Sign) -> str:
    """Sentence that describes a sign, with the word in quotation marks.

    The word comes last: its letters then always have the same distance to the first token of the
    image, from which such a small model with relative positions learns to copy them.
    """
    place = "below" if sign.is_word_above else "above"
    return f'{COLOUR_NAMES[sign.colours]}: a {sign.shape} {place} the word "{sign.word}"'


def is_caption(text: str) -> bool:
    """Whether `caption` can return this text for some sign."""
    return _CAPTION.fullmatch(text) is not None


def sign_cells(sign: Sign) -> Int64[Tensor, "4 4"]:
    """Cell ids of a sign, row by row."""
    grid = torch.full((GRID, GRID), BLANK, dtype=torch.int64)
    word_row, shape_row = (1, 2) if sign.is_word_above else (2, 0)
    for column, letter in enumerate(sign.word):
        grid[word_row, column] = LETTERS.index(letter)
    first = len(LETTERS) + 4 * SHAPES.index(sign.shape)
    grid[shape_row : shape_row + 2, 1:3] = torch.arange(first, first + 4).view(2, 2)
    return grid + KINDS * sign.colours


def draw_cells(cells: Int64[Tensor, "*B h w"]) -> UInt8[Tensor, "*B 3 H W"]:
    """Draw grids of cell ids; H = 32 h, W = 32 w."""
    tiles = cell_atlas()[cells]
    *batch, rows, columns = cells.shape
    lead = len(batch)
    order = (*range(lead), lead + 2, lead, lead + 3, lead + 1, lead + 4)
    return tiles.permute(order).reshape(*batch, 3, rows * CELL, columns * CELL)


def draw_sign(sign: Sign) -> UInt8[Tensor, "3 128 128"]:
    """Draw one sign."""
    return draw_cells(sign_cells(sign))


def random_sign(rng: np.random.Generator) -> Sign:
    """Make a sign with a random string of 3 or 4 letters that is not a held-out word."""
    while True:
        length = int(rng.integers(3, 5))
        word = "".join(LETTERS[i] for i in rng.integers(len(LETTERS), size=length))
        if word not in HELD_OUT_WORDS:
            break
    return _random_sign_of(word, rng)


def signs_of_words(words: tuple[str, ...], *, seed: int) -> list[Sign]:
    """Make one sign per word, with shapes, colours and positions drawn from the seed.

    Raises:
        ConfigError: Some words do not fit on a sign.
    """
    if unfit := [word for word in words if not re.fullmatch(WORD_PATTERN, word)]:
        raise ConfigError(
            f"{', '.join(map(repr, unfit))}: a word on a sign has 3 or 4 capital letters from A to "
            "Z, such as 'KITE'; choose other words"
        )
    rng = np.random.default_rng(seed)
    return [_random_sign_of(word, rng) for word in words]


def confuse(sign: Sign, rng: np.random.Generator, *, letter_rate: float, other_rate: float) -> Sign:
    """Change a sign to one that a careless captioner might describe.

    Each letter is replaced by a random one with probability `letter_rate`; shape, colours and
    position each with probability `other_rate`. The result never contains a held-out word.
    """
    while True:
        letters = [
            LETTERS[rng.integers(len(LETTERS))] if rng.random() < letter_rate else letter
            for letter in sign.word
        ]
        if (word := "".join(letters)) not in HELD_OUT_WORDS:
            break
    other = _random_sign_of(word, rng)
    return Sign(
        word=word,
        shape=other.shape if rng.random() < other_rate else sign.shape,
        colours=other.colours if rng.random() < other_rate else sign.colours,
        is_word_above=other.is_word_above if rng.random() < other_rate else sign.is_word_above,
    )


def random_mosaic(rng: np.random.Generator) -> Int64[Tensor, "4 4"]:
    """Arrange cells in random order, to teach the decoder every cell in every position.

    Three in four cells are letters, the rest shape quadrants and blanks; half of the mosaics use
    one pair of colours, the others mix them.
    """
    letters = rng.integers(len(LETTERS), size=(GRID, GRID))
    others = rng.integers(len(LETTERS), KINDS, size=(GRID, GRID))
    kinds = np.where(rng.random((GRID, GRID)) < 0.75, letters, others)
    pairs = rng.integers(len(COLOUR_PAIRS), size=(GRID, GRID))
    if rng.random() < 0.5:
        pairs = np.full((GRID, GRID), pairs[0, 0])
    return torch.from_numpy(kinds + KINDS * pairs)


@functools.cache
def cell_atlas() -> UInt8[Tensor, "C 3 32 32"]:
    """Every distinct cell, drawn once: C = NUM_CELLS, index = kind + KINDS * colour pair."""
    tiles = [_draw_cell(kind, pair) for pair in COLOUR_PAIRS for kind in range(KINDS)]
    return torch.from_numpy(np.stack(tiles)).permute(0, 3, 1, 2).contiguous()


def _random_sign_of(word: str, rng: np.random.Generator) -> Sign:
    return Sign(
        word=word,
        shape=SHAPES[rng.integers(len(SHAPES))],
        colours=int(rng.integers(len(COLOUR_PAIRS))),
        is_word_above=bool(rng.integers(2)),
    )


def _draw_cell(kind: int, pair: tuple[str, str]) -> np.ndarray:
    foreground, background = (COLOURS[name] for name in pair)
    if kind < len(LETTERS):
        return _draw_letter(LETTERS[kind], foreground, background)
    if kind == BLANK:
        return np.asarray(Image.new("RGB", (CELL, CELL), background))
    shape, quadrant = divmod(kind - len(LETTERS), 4)
    block = np.asarray(_draw_shape(SHAPES[shape], foreground, background))
    top, left = CELL * (quadrant // 2), CELL * (quadrant % 2)
    return block[top : top + CELL, left : left + CELL]


def _draw_letter(
    letter: str, foreground: tuple[int, ...], background: tuple[int, ...]
) -> np.ndarray:
    image = Image.new("RGB", (CELL, CELL), background)
    ImageDraw.Draw(image).text(
        (CELL / 2, CELL / 2),
        letter,
        fill=foreground,
        font=ImageFont.load_default(size=30),
        anchor="mm",
        stroke_width=1,
        stroke_fill=foreground,
    )
    return np.asarray(image)


def _draw_shape(
    shape: str, foreground: tuple[int, ...], background: tuple[int, ...]
) -> Image.Image:
    image = Image.new("RGB", (2 * CELL, 2 * CELL), background)
    draw = ImageDraw.Draw(image)
    low, high = 6, 2 * CELL - 7
    if shape == "circle":
        draw.ellipse((low, low, high, high), fill=foreground)
    elif shape == "square":
        draw.rectangle((low, low, high, high), fill=foreground)
    else:
        draw.polygon([(CELL, low), (high, high), (low, high)], fill=foreground)
    return image
