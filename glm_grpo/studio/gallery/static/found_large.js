/* The large view of images that a list or a ranking found: in their order, whatever step they are of. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts } = gallery;
  const { LargeView, movesIn } = parts;
  const { useMemo } = preactHooks;

  /* What the large view needs of an image of either kind. */
  function itemOf({ kind, step, group, sample }) {
    if (kind === "evaluation") {
      const row = { id: group.prompt_id, group, bySteps: { [step]: group } };
      return gallery.progressDetails.largeItem({ row, step, sample }, null);
    }
    const reach = Math.max(...group.advantage.map(Math.abs));
    return gallery.groupSamples.largeItem(gallery.groupSamples.arrange(group), sample, step, reach);
  }

  /**
   * @param rows Images as they stand: [[{kind, step, group, sample}]], kind "training" or
   *     "evaluation"; rows of one image each are a list, in which left and right go on.
   * @param at Stored path of the image shown; nothing is shown where no row has it.
   * @param onShow Called with the path of the next.
   * @param onClose Called when the view was left.
   */
  function FoundLarge({ rows, at, onShow, onClose }) {
    const pathOf = ({ group, sample }) => group.images[sample];
    const row = useMemo(
      () => rows.findIndex((images) => images.some((image) => pathOf(image) === at)),
      [rows, at],
    );
    const item = useMemo(() => {
      const found = rows[row]?.find((image) => pathOf(image) === at);
      return found && itemOf(found);
    }, [rows, row, at]);
    if (!item) return null;
    const column = rows[row].findIndex((image) => pathOf(image) === at);
    const counts = rows.map((images) => images.length);
    const moves = movesIn(counts, [row, column], ([nextRow, nextColumn]) =>
      onShow(pathOf(rows[nextRow][nextColumn])),
    );
    const near = [rows[row - 1]?.[0], rows[row + 1]?.[0], rows[row][column - 1], rows[row][column + 1]];
    return html`<${LargeView} item=${item} moves=${moves} near=${near.filter(Boolean).map(pathOf)}
      onClose=${onClose} />`;
  }

  parts.FoundLarge = FoundLarge;
})();
