"""The page of ``tandem operators plan --html``: tables and figures in one file, without scripts or the network."""

import html
from collections.abc import Iterable, Sequence

from autoscale.operators.costs import Phase
from autoscale.operators.sm_shares import load_shares
from serve_app.local.shipped import shipped
from serve_app.operators.figures import svg_of
from serve_app.operators.inputs import Subject
from serve_app.operators.panels import Figure
from serve_app.operators.sensitivity import TABLE_1, sensitivity_figure
from serve_app.operators.sweeps import Base, sweep_figures


def page(title: str, lines: Sequence[str], sections: Iterable[str]) -> str:
    """A whole page from its title, first lines and sections."""
    first = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    return _PAGE.format(title=html.escape(title), first=first, sections="\n".join(sections))


def heading(text: str, level: int = 2) -> str:
    """A heading."""
    return f"<h{level}>{html.escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    """A paragraph of small text."""
    return f'<p class="small">{html.escape(text)}</p>'


def notes(lines: Sequence[str]) -> str:
    """A list of notes; empty without any."""
    return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column has names."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def beside(parts: Iterable[str]) -> str:
    """Parts of a page side by side, as far as the page is wide."""
    return f'<div class="beside">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def drawn(figure: Figure) -> str:
    """A figure with its title and caption."""
    caption = f"<b>{html.escape(figure.title)}.</b> {html.escape(figure.caption)}"
    return f"<figure><figcaption>{caption}</figcaption>{svg_of(figure)}</figure>"


def study_sections(bases: Sequence[Base]) -> list[str]:
    """Sweeps around the points of the phases, then the sensitivity of the operators of Table 1's models."""
    sections = [heading("What saves, and where: GPUs by length, rate and model")]
    sections += [drawn(figure) for base in bases for figure in sweep_figures(base)]
    sections.append(heading("How operators react: the five models of the paper's Table 1"))
    lengths = {base.phase: base.length_tokens for base in bases}
    return sections + _sensitivities(bases[0].subject, lengths)


def _sensitivities(subject: Subject, lengths: dict[Phase, int]) -> list[str]:
    shares = load_shares(shipped("operators/contention/h100_80gb_sm_shares.csv"))
    models = [subject if name == subject.name else subject.with_model(name) for name in TABLE_1]
    return [
        drawn(sensitivity_figure(model, phase, length, shares)) for model in models for phase, length in lengths.items()
    ]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"/><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: #222;
  background: #fff }}
table {{ border-collapse: collapse; font-size: 13px }} td, th {{ padding: .2rem .4rem; text-align: right }}
th {{ border-bottom: 2px solid #444 }} td {{ border-bottom: 1px solid #ddd }}
td:first-child, th:first-child {{ text-align: left }} figure {{ margin: 1.5rem 0 }}
svg {{ max-width: 100%; height: auto }} figcaption, .small {{ color: #555; font-size: 13px }}
.beside {{ display: flex; flex-wrap: wrap; gap: 0 1.5rem }}
.wide {{ overflow-x: auto; margin: 1rem 0 }}
</style></head><body>
<h1>{title}</h1>{first}
{sections}
</body></html>
"""
