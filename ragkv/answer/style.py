"""The look of the page of `ragkv.answer.page`: rules that follow `ragkv.page.BASE_STYLE`."""

# Levels 1 to 3 of shading and of underline follow the attention; numbers in the text say the same without colour.
STYLE = """
:root { --one: #fdf6dc; --two: #fbe9a9; --three: #f8d667; --heat: #8a4b00; --card: #f6f7f9; --faint: #c3c9d4; }
@media (prefers-color-scheme: dark) { :root { --one: #2b2713; --two: #423813; --three: #5f4d0b; --heat: #ffc56b;
  --card: #1b1f27; --faint: #4c5463; } }
html { scroll-padding-top: 3.5rem; }
body { max-width: 60rem; padding-bottom: 3rem; }
.skip { position: absolute; left: -999rem; background: var(--page); padding: 0.5rem 0.75rem; z-index: 2; }
.skip:focus { left: 0.5rem; top: 0.5rem; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.eyebrow { margin: 0; color: var(--soft); font-size: 0.9rem; }
h1 { font-size: clamp(1.5rem, 1.1rem + 1.8vw, 2.2rem); text-wrap: balance; white-space: pre-line;
  unicode-bidi: plaintext; }
h1.long { font-size: 1.15rem; font-weight: 600; text-wrap: wrap; }
h2 { margin-top: 2.75rem; }
h3 { margin: 0; font-size: 1.1rem; line-height: 1.35; unicode-bidi: plaintext; }
h4 { margin: 0; font-size: 0.95rem; display: flex; flex-wrap: wrap; align-items: center; gap: 0.25rem 0.6rem; }
.answer { margin: 0.75rem 0 0; padding: 1rem 1.25rem; border-left: 0.3rem solid var(--link); background: var(--mark);
  border-radius: 0 0.5rem 0.5rem 0; font-size: 1.2rem; line-height: 1.5; white-space: pre-wrap;
  unicode-bidi: plaintext; }
.note { color: var(--soft); font-size: 0.92rem; max-width: 44rem; }
.text { white-space: pre-wrap; unicode-bidi: plaintext; tab-size: 4; margin: 0;
  font: 1.05rem/1.65 Charter, "Iowan Old Style", Georgia, serif; }
.context { color: var(--soft); }
.pct { font-variant-numeric: tabular-nums; white-space: nowrap; }

.sources { list-style: none; margin: 1rem 0; padding: 0; }
.sources li { display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: 0.3rem 1rem; padding: 0.7rem 0;
  border-top: 1px solid var(--line); align-items: baseline; }
.sources li:last-child { border-bottom: 1px solid var(--line); }
.sources .pct { font-weight: 700; }
.bar { grid-column: 1 / -1; height: 0.5rem; border-radius: 0.25rem; background: var(--card);
  box-shadow: inset 0 0 0 1px var(--line); }
.bar span { display: block; height: 100%; border-radius: inherit; background: var(--heat); }
.chips { grid-column: 1 / -1; display: flex; flex-wrap: wrap; gap: 0.4rem; align-items: center; color: var(--soft);
  font-size: 0.9rem; margin: 0.2rem 0 0; }
.chip { display: inline-grid; place-items: center; position: relative; min-width: 2rem; height: 2rem;
  padding: 0 0.45rem; flex: none;
  border: 1px solid var(--heat); border-radius: 1rem; background: var(--two); color: var(--ink); font-weight: 700;
  font-size: 0.9rem; text-decoration: none; font-variant-numeric: tabular-nums; }
a.chip:hover { background: var(--three); }

.source { border: 1px solid var(--line); border-radius: 0.6rem; padding: 1rem 1.25rem 0;
  margin: 1.25rem 0; }
.source > header { display: flex; justify-content: space-between; align-items: baseline; gap: 0.25rem 1rem;
  flex-wrap: wrap; }
.strip { margin: 0.75rem 0 0; }
.strip svg { display: block; width: 100%; height: 2.75rem; border-bottom: 1px solid var(--soft); }
.strip rect { fill: var(--faint); }
.strip .in { fill: var(--heat); }
.ends { display: flex; justify-content: space-between; gap: 1rem; color: var(--soft); font-size: 0.8rem;
  padding-top: 0.2rem; }
.passage { border-top: 1px solid var(--line); margin-top: 1rem; padding-top: 1rem; }
.passage .text { margin: 0.6rem 0; }
.passage:target { outline: 2px solid var(--link); outline-offset: 0.5rem; border-radius: 0.2rem; }
.where { font-weight: 400; color: var(--soft); }
.links { margin: 0; display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; font-size: 0.92rem; }
.links a { display: inline-block; padding: 0.25rem 0; }
mark { color: inherit; padding: 0.08em 0 0.2em; text-decoration: underline dotted 1px; text-underline-offset: 0.22em;
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
mark.one { background: var(--one); }
mark.two { background: var(--two); }
mark.three { background: var(--three); }
mark:target { outline: 2px solid var(--link); outline-offset: 2px; }
u { text-decoration: underline solid var(--heat) 1px; text-underline-offset: 0.22em; text-decoration-skip-ink: none; }
u.two { text-decoration-thickness: 2px; }
u.three { text-decoration-thickness: 4px; }
sup { line-height: 0; font: 700 0.75rem/0 system-ui, sans-serif; }
mark sup a { color: inherit; padding: 0.7rem 0.3rem; }

details { border-top: 1px solid var(--line); margin-top: 1rem; }
summary { cursor: pointer; padding: 0.65rem 0; font-weight: 600; background: var(--page);
  border-radius: 0.6rem; }
details[open] > summary { position: sticky; top: 0; border-radius: 0; z-index: 1;
  border-bottom: 1px solid var(--line); }
details .text { padding: 0.75rem 0; font-size: 1rem; }

.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(13.5rem, 1fr)); gap: 1px;
  border: 1px solid var(--line); border-radius: 0.6rem; overflow: hidden; margin: 1rem 0; }
.figures div { background: var(--page); padding: 0.7rem 1rem; box-shadow: 0 0 0 1px var(--line); }
.figures dt { color: var(--soft); font-size: 0.88rem; }
.figures dd { margin: 0; font-size: 1.15rem; font-weight: 650; font-variant-numeric: tabular-nums; line-height: 1.35; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1.5rem; }
.charts figure { margin: 0.75rem 0 0; }
.charts figcaption { font-size: 0.92rem; margin-bottom: 0.5rem; min-height: 1.5em; }
.plot { display: grid; grid-template-columns: auto minmax(0, 1fr); gap: 0.2rem 0.5rem; color: var(--soft);
  font-size: 0.8rem; font-variant-numeric: tabular-nums; line-height: 1; }
.plot svg { display: block; width: 100%; height: 8rem; border-bottom: 1px solid var(--soft); }
.plot .y { display: flex; flex-direction: column; justify-content: space-between; align-items: flex-end; }
.plot .ends { grid-column: 2; }
.plot rect { fill: var(--link); }
.plot line { stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 0.75rem; color: var(--soft);
  font-size: 0.9rem; }

@media (max-width: 30rem) {
  body { padding: 1rem; }
  .source { padding: 0.9rem 0.9rem 0; }
  .answer { padding: 0.85rem 1rem; font-size: 1.12rem; }
  .figures { grid-template-columns: 1fr 1fr; }
  .figures div { padding: 0.6rem 0.75rem; }
}
@media print {
  :root { --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --mark: #eef3fa; --link: #0b5394; --one: #fdf6dc;
    --two: #fbe9a9; --three: #f8d667; --heat: #8a4b00; --card: #f6f7f9; --faint: #c3c9d4; }
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  mark, .bar span, .answer, .chip, rect { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  .source { padding-bottom: 0.75rem; }
  .skip, .links, details:not([open]) { display: none; }
  .passage, .figures div, figure { break-inside: avoid; }
  h2, h3, h4 { break-after: avoid; }
  details[open] > summary { position: static; }
}
"""
