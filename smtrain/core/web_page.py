"""Frame and style of every HTML page that we write: it fetches nothing, is light or dark, and fits a phone."""

from __future__ import annotations

import base64

# Wide tables scroll inside `.wide`. Its four backgrounds show a shadow at an edge behind which there is more: the
# shadows stay with the box, the covers of the paper's colour move with what scrolls. No cell may have a background.
_STYLE = """
:root{color-scheme:light dark;--ink:#1c1e21;--dim:#5c6370;--paper:#fff;--edge:#d7dae0;--soft:#f4f5f7;
--line:#1769aa;--dot:#c2541b;--good:#1b6e2d;--bad:#b3261e;--warn:#7a4d00;--shade:rgba(20,24,32,.32);--clear:#fff0}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--dim:#a2a9b4;--paper:#16181c;--edge:#3a3f47;--soft:#1f2228;
--line:#6cb6ff;--dot:#ff9d5c;--good:#6fce82;--bad:#ff8a80;--warn:#f0b95b;--shade:rgba(255,255,255,.38);--clear:#16181c00}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;margin:.2em 0}h2{font-size:1.15rem;margin:2em 0 .5em;border-bottom:1px solid var(--edge)}
.dim,figcaption{color:var(--dim);font-size:.9rem}.bad{color:var(--bad)}.good{color:var(--good)}.warn{color:var(--warn)}
.wide{overflow-x:auto;background:
linear-gradient(to right,var(--paper) 40%,var(--clear)) left/2.5rem 100% local,
linear-gradient(to left,var(--paper) 40%,var(--clear)) right/2.5rem 100% local,
linear-gradient(to right,var(--shade),transparent) left/.8rem 100% scroll,
linear-gradient(to left,var(--shade),transparent) right/.8rem 100% scroll;background-repeat:no-repeat}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:left;padding:.3em .7em .3em 0;border-bottom:1px solid var(--edge);vertical-align:top;
overflow-wrap:normal}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}.one{white-space:nowrap}
figure{margin:0}svg{max-width:100%;height:auto;display:block}
pre{background:var(--soft);border:1px solid var(--edge);border-radius:4px;padding:.7em;overflow-x:auto;
font-size:.85rem;white-space:pre-wrap}
"""


def document(title: str, body: str, style: str = "", generator: str = "smtrain") -> str:
    """A whole page. `title` and `body` are HTML, `style` is CSS after the common one, `generator` names the maker."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="generator" content="{generator}">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{_STYLE}{style}</style></head><body>\n{body}\n</body></html>\n"
    )


def wide(table: str) -> str:
    """A table in a box that scrolls by itself if the page is too narrow, also by the keyboard."""
    return f'<div class="wide" tabindex="0">{table}</div>'


def image(svg: str, words: str, width: int) -> str:
    """An SVG as an HTML image of at most `width` pixels; notebooks that are not trusted show no SVG but in one."""
    data = base64.b64encode(svg.encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{data}" alt="{words}" '
        f'style="display:block;width:100%;max-width:{width}px;height:auto">'
    )
