"""Render HTML pages from the templates of this package."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from glm_grpo.output import counted

_ENVIRONMENT = Environment(
    loader=PackageLoader("glm_grpo.studio.gallery"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.globals["counted"] = counted


def render_page(template_name: str, **values: object) -> bytes:
    """Fill a template from `templates/`; text values are escaped.

    Args:
        template_name: File name, such as `compare.html.j2`.
        values: Values for the template; a missing one raises `jinja2.UndefinedError`.

    Returns:
        The page in UTF-8. Lone surrogates, as in file names that are not UTF-8, become question
        marks.
    """
    return _ENVIRONMENT.get_template(template_name).render(values).encode("utf-8", "replace")
