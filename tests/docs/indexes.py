"""The index pages of the site, its gallery, its Markdown twins and llms.txt."""

import json
import re

import nbformat

from tests.docs.entries import (
    HTML,
    NAME,
    ROOT,
    SOURCE,
    WORDS,
    Entry,
    anchor,
    cards,
    first_plots,
    is_tall,
    public_pages,
)
from tests.docs.figures import caption as caption_of
from tests.docs.signatures import cell

SECTIONS = {  # folder of nbs -> (title of its index page, what stands there)
    "symptoms": (
        "Symptoms",
        "Find what you see, then read what causes it, how to tell the causes apart and what to do. Or search "
        "in your own words, here or in a terminal: `stabilitylab explain loss is NaN`.",
    ),
    "tutorials": (
        "Tutorials",
        "Do a whole job in about ten minutes. The tests run each page as it stands.",
    ),
    "howto": ("How-to guides", "One question each, for the moment when you have it."),
    "explain": ("Explanations", "What goes wrong in training runs, why, and what teams did about it."),
    "api": ("Library", "Every public function by what you want to do, with a lesson that checks and shows."),
}
ORDER = (  # of the tutorials; the other sections go by name
    "a_run_that_diverged",
    "read_a_strangers_log",
    "record_your_next_run",
    "hugging_face_trainer",
    "torchrun_two_processes",
    "from_spike_to_culprit",
    "test_a_fix",
    "a_pure_bf16_run",
    "audit_your_accumulation",
    "the_workbench",
)
GALLERY = (
    "Every plot of the library with the call that makes it, then every view of the workbench. "
    "Follow the link below a call to see how to make its data."
)
FIGURE = """
```{{figure}} ../images/symptoms/{kind}.png
:alt: {title}

{caption}
```
"""
# a line of what teams tried
INSTALL = "[install](../index.ipynb#install)"
REPORT = r"- (worked|unclear|did not work): (.*) \(([^()]*(?:\([^()]*\)[^()]*)*)\)\n?"
FIELDS = {  # section -> heading on its index -> the pages below it
    "symptoms": {
        "The loss": (
            "non_finite loss_spike divergence plateau not_learning slow_rise level_shift overfitting "
            "leak_suspected quantized_loss init_too_large data_driven_spike length_bias"
        ),
        "A crash, a resume, the machine": (
            "crash restart resume_spike throughput_drop data_stall memory_growth hardware_error "
            "environment_change"
        ),
        "Gradients, optimizer and learning rate": (
            "grad_norm_explosion lr_too_high lr_jump update_rms_excess optimizer_state_reset "
            "grad_below_epsilon no_gradient dead_network accumulation_bias token_imbalance "
            "bad_batch_values"
        ),
        "Layers and attention": (
            "activation_explosion massive_activation attention_logit_growth attention_entropy_collapse "
            "attention_sink output_logit_drift z_loss_collapse output_collapse layer_ignored dead_units "
            "expert_collapse init_std_too_large"
        ),
        "Number formats": ("loss_scale_collapse overflow underflow update_lost_to_rounding misaligned_shape"),
        "Reinforcement learning": (
            "policy_entropy_collapse policy_entropy_rise policy_step_too_large reward_collapse "
            "zero_advantage answers_cut"
        ),
    },
    "howto": {
        "Open what a run left": (
            "what_it_opens open_hugging_face open_megatron_and_deepspeed open_nanogpt_and_torchtitan "
            "open_tensorboard_and_wandb open_any_other_log"
        ),
        "Find the culprit": (
            "the_loss_is_nan which_batch which_layers_in_fp32 is_it_the_hardware replay_your_own_run "
            "choose_a_restart_point"
        ),
        "Record, and extend": (
            "beside_your_tracker be_warned_before_the_loss on_a_cluster many_ranks add_your_own"
        ),
    },
    "explain": {
        "What goes wrong": (
            "activation_explosions adam_before_the_spike attention_logits attention_sinks attention_layers "
            "attention_cross accumulation_is_not_batch_size"
        ),
        "Number formats": "pure_bf16_training eleven_values inside_qk spikes_of_rounding",
        "What teams tried, and what came out here": (
            "case_studies remedies table_of_fixes results_reproduced open_experiments notes_item_by_item "
            "trainings_of_the_notes"
        ),
        "How findings are made": (
            "spike_rules limits how_often_a_verdict_is_wrong what_a_replay_checks "
            "what_the_recorder_survives promises"
        ),
        "The project": "glossary beside_other_tools how_it_is_built",
    },
}
COMMON = (  # what people type most -> its symptom; on the home page
    ("Loss is NaN", "non_finite"),
    ("Loss spikes", "loss_spike"),
    ("Loss diverges", "divergence"),
    ("Loss does not fall", "not_learning"),
    ("Loss jumps after a resume", "resume_spike"),
    ("Gradient norm explodes", "grad_norm_explosion"),
    ("Loss scale keeps halving", "loss_scale_collapse"),
    ("Accumulation is worse than a batch", "accumulation_bias"),
    ("Entropy collapses in GRPO", "policy_entropy_collapse"),
    ("The job died", "crash"),
)
VIEWS = "`Workbench(path)` has all of them. The code is what *Copy the call* gives for what the view shows."
GROUPS = (  # what a person wants to do -> rooms of the package, with what stands in each
    (
        "Open a run",
        "A log, a folder, a record or a checkpoint becomes one object with steps, series and events.",
        {
            "read": "Reading runs",
            "read/logs": "Log formats",
            "read/freetext": "The general reader of lines",
            "read/crash": "Crash evidence",
            "run": "The record of a run",
            "checkpoint": "Checkpoints",
        },
    ),
    (
        "Find out what happened",
        "Findings with evidence, the cause that fits them, and what teams reported about it.",
        {
            "detect": "Detectors",
            "detect/loss": "Detectors of the loss",
            "detect/layers": "Detectors of the layers",
            "detect/facts": "What a record says for and against a cause",
            "knowledge": "What teams reported",
            "report": "Reports",
            "investigation": "The whole loop in one call",
        },
    ),
    (
        "Look at it",
        "Plots take computed data and return their axes; the workbench links them.",
        {"plot": "Plots", "workbench": "The workbench"},
    ),
    (
        "Record a run that is training",
        "Statistics of every module and parameter, attention by head, and what is needed to replay a step.",
        {
            "probe": "Recording a live run",
            "probe/attention": "Measuring attention",
            "probe/checks": "Checks of a model",
            "probe/draft": "The draft of a replay",
        },
    ),
    (
        "Run a step again",
        "The recorded step bit for bit, then other batches, other states, other number formats.",
        {
            "replay": "Replaying a step",
            "numerics": "Number formats",
            "numerics/rounding": "Rounding of a loss or a step",
            "numerics/accumulation": "Gradient accumulation",
        },
    ),
    (
        "Test a fix",
        "Remedies that can be previewed, applied and undone, and the experiment that compares them.",
        {
            "fixes": "Fixes",
            "trial": "Trials",
            "cases": "Runs that fail on purpose",
            "models": "Reference models",
        },
    ),
    (
        "From the shell, and for readers of the code",
        "The command, and the names, units and errors that everything else is built on.",
        {"cli": "The command", "mcp": "For coding agents", "names": "Names and units"},
    ),
)
ROOMS = {room: title for _, _, rooms in GROUPS for room, title in rooms.items()}


def index_page(name, title, text, body, fields):
    "Writes an index in MyST; the navigation alone shows its tables of contents, caption -> pages."
    source = f"# {title}\n\n{text}\n\n{body}\n\n"
    for caption, pages in fields.items():
        options = ":hidden:" + (f"\n:caption: {caption}" if caption else "")
        source += "```{toctree}\n" + "\n".join([options, "", *pages]) + "\n```\n\n"
    (SOURCE / f"{name}.md").write_text(source, encoding="utf-8")


def report_table(lines):
    "What teams tried, as a table: the match of several lines of REPORT."
    reports = re.findall(REPORT, lines[0])
    rows = (f"| {outcome.replace(' ', '&nbsp;')} | {fix} | {source} |" for outcome, fix, source in reports)
    return "\n".join(["| reported | what | who |", "|---|---|---|", *rows, ""])


def write_symptoms():
    "A page a symptom, with the phrases that people type as entries of the search; as entries of the index."
    from stabilitylab.knowledge.symptoms import symptom, symptoms

    folder, entries = SOURCE / "symptoms", []
    folder.mkdir()
    for kind in symptoms().index:
        one = symptom(kind)
        typed = "\n".join(f"```{{index}} ! single: {phrase}\n```" for phrase in (one.title, *one.aliases))
        picture = ROOT / "nbs" / "images" / "symptoms" / f"{kind}.png"
        title, rest = one.markdown.split("\n", 1)
        head, rest = rest.split("\n\n## ", 1)
        drawn = (
            FIGURE.format(kind=kind, title=one.title, caption=caption_of(kind)) if picture.is_file() else ""
        )
        rest = re.sub(rf"(?:^{REPORT})+", report_table, rest, flags=re.M)
        other = "|".join(name for name in symptoms().index if name != kind)
        rest = re.sub(rf"`({other})`", r"[`\1`](\1.md)", rest)
        rest = rest.replace("diagnose path/to/run` ", f"diagnose path/to/run` ({INSTALL}) ", 1)
        also = f"\nPeople also write: {'; '.join(one.aliases)}.\n"
        pages = [f"- [{page_title(ROOT / 'nbs' / page)}](../{page})" for page in one.see]
        below = "\n## Read on\n\n" + "\n".join(pages) + "\n" if pages else ""
        text = f"{typed}\n\n{title}\n{head}\n{drawn}\n## {rest}{below}{also}"
        (folder / f"{kind}.md").write_text(text, encoding="utf-8")
        line = first_sentence(one.looks)
        entry = Entry(
            f"symptoms/{kind}", one.title, line, f"{kind}.png" if drawn else "", "\n".join(one.aliases)
        )
        entries.append(entry)
        entry.is_tall = bool(drawn) and is_tall(picture.read_bytes())
        entry.text = WORDS.sub("", text)
    return entries


def in_fields(entries, section):
    "The names of the pages of each field of a section, and their cards below its heading."
    by_name = {entry.name.rpartition("/")[2]: entry for entry in entries}
    fields = {title: names.split() for title, names in FIELDS[section].items()}
    listed = {name for names in fields.values() for name in names}
    if not listed <= set(by_name):
        raise ValueError(
            f"FIELDS in indexes.py has pages that are not there: {sorted(listed - set(by_name))}"
        )
    if more := [name for name in by_name if name not in listed]:
        fields["More"] = more
    body = (f"## {title}\n\n{cards([by_name[n] for n in names], section)}" for title, names in fields.items())
    return fields, "\n\n".join(body)


def write_search():
    "What the search page needs to find symptoms by the words that people type; see static/symptoms.js."
    from stabilitylab.knowledge import symptoms as by_words

    rows = []
    for kind, (_, *phrases) in by_words._index().items():
        one = by_words.symptom(kind)
        row = {"kind": kind, "title": one.title, "line": first_sentence(one.looks)}
        rows.append(row | {"phrases": [sorted(phrase) for phrase in phrases]})
    words = {
        "same": by_words._synonyms(),
        "empty": by_words._table()["empty"].split(),
        "endings": by_words._ENDINGS,
    }
    text = json.dumps(words | {"least": by_words._MIN_LIKENESS, "symptoms": rows}, ensure_ascii=False)
    (HTML / "_static" / "symptom_words.js").write_text(f"window.symptomWords = {text};\n", encoding="utf-8")


def first_sentence(text):
    "Of several."
    return f"{text.partition('. ')[0].rstrip('.')}."


def page_title(path):
    "The heading of a notebook."
    cells = nbformat.read(path, 4).cells
    heading = re.search(r"^# (.*)", "\n".join(c.source for c in cells if c.cell_type == "markdown"), re.M)
    return heading[1].replace("`", "")


def calls_table(names, pages):
    "Public names as a table: the call, linked to its page, and what comes back."
    import stabilitylab

    rows = []
    for name in sorted(names & set(pages), key=str.lower):
        said = (getattr(stabilitylab, name).__doc__ or "").strip().partition("\n")[0]
        where = f"{pages[name].removeprefix('api/')}.ipynb#{anchor(name)}"
        rows.append(f"| [`{name}`]({where}) | {cell(said)} |")
    return "\n".join(["| call | what comes back |", "|---|---|", *rows]) if rows else ""


def write_library(entries):
    "The index of the library by what a person wants to do, and one a room."
    import stabilitylab

    body, rooms, pages = [], [], public_pages()
    public = {n for n in stabilitylab.__all__ if not n.startswith("_")}
    for title, text, group in GROUPS:
        present = [room for room in group if (SOURCE / "api" / room).is_dir()]
        for room in present:
            inside = [e for e in entries if e.name.rpartition("/")[0] == f"api/{room}"]
            below = [r.removeprefix(room + "/") + "/index" for r in present if r.startswith(room + "/")]
            names = [e.name.rpartition("/")[2] for e in inside] + below
            line = f"{title}: the package `stabilitylab.{room.replace('/', '.')}`."
            index_page(f"api/{room}/index", group[room], line, cards(inside, f"api/{room}"), {"": names})
        names = {n for n in public if getattr(stabilitylab, n).__module__.split(".")[1] in group}
        links = " · ".join(f"[{group[room]}]({room}/index.md)" for room in present)
        body += [f"## {title}", text, calls_table(names, pages), f"All pages: {links}"] if present else []
        rooms += [f"{room}/index" for room in present if "/" not in room]
    index_page("api/index", *SECTIONS["api"], "\n\n".join(part for part in body if part), {"": rooms})


def figure(link, file, alt):
    "A picture of the gallery."
    picture = f'<img src="_images/{file}" alt="{alt}" loading="lazy">'
    return f'<a class="figure-of-call" href="{link}.html">{picture}</a>'


def write_gallery(entries):
    "Every plot with the call that makes it, and every view of the workbench."
    import stabilitylab

    parts = ["# Gallery", GALLERY, "## Plots"]
    for name, (entry, call, image) in first_plots(entries).items():
        said = (
            first_sentence(getattr(stabilitylab, name, None).__doc__ or "")
            if hasattr(stabilitylab, name)
            else ""
        )
        parts += [f"### {name}", said, figure(entry.name, image, name), f"```python\n{call}\n```"]
        parts += [f"From [{entry.title}]({entry.name}.ipynb)."]
    views = ROOT / "nbs" / "images" / "views.json"
    for name, call in json.loads(views.read_text()).items() if views.is_file() else ():
        files = (f"{file}.png" for file in (name, f"view_{name}", "fix_lab"))
        file = next(file for file in files if (ROOT / "nbs" / "images" / file).is_file())
        parts += [] if name != "overview" else ["## Views of the workbench", VIEWS]
        parts += [f"### {name.capitalize()}", figure("tutorials/the_workbench", file, name)]
        parts += [f"```python\n{call}\n```"] if call else []
    (SOURCE / "gallery.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def symptom_links():
    "The symptoms that people name most, for the home page."
    links = "".join(f'<a href="symptoms/{kind}.html">{typed}</a>' for typed, kind in COMMON)
    links += '<a href="symptoms/index.html">All symptoms</a>'
    return f'## What do you see?\n\n<div class="symptom-links">{links}</div>'


def write_indexes(entries, only=()):
    "One index a section and a room, the gallery, the changes, and the root."
    entries, sections = [*write_symptoms(), *entries], []
    for name, (title, text) in SECTIONS.items():
        inside = [e for e in entries if e.name.rpartition("/")[0] == name]
        inside.sort(key=lambda e: ORDER.index(end) if (end := e.name.rpartition("/")[2]) in ORDER else 99)
        if name == "api" and (SOURCE / "api").is_dir():
            write_library(entries)
        elif inside:
            fields, body = {"": [e.name.partition("/")[2] for e in inside]}, cards(inside, name)
            if name in FIELDS and not only:
                fields, body = in_fields(inside, name)
            index_page(f"{name}/index", title, text, body, fields)
        else:
            continue
        sections.append(f"{name}/index")
    write_gallery(entries)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("# Changelog", "# Changes", 1)
    (SOURCE / "changes.md").write_text(changes, encoding="utf-8")
    home = nbformat.read(SOURCE / "index.ipynb", 4)
    if "symptoms/index" in sections:
        home.cells.insert(2, nbformat.v4.new_markdown_cell(symptom_links()))
    contents = "```{toctree}\n:hidden:\n\n" + "\n".join([*sections, "gallery", "changes"]) + "\n```"
    home.cells.append(nbformat.v4.new_markdown_cell(contents))
    nbformat.write(home, SOURCE / "index.ipynb")
    return entries


def plain_index(text):
    "An index page without directives and HTML: a line an entry."
    card = r'<a class="card-link" href="([^"]+)\.html">.*?<b>(.*?)</b><span>(.*?)</span></a>'
    text = re.sub(card, r"- [\2](\1.md): \3", WORDS.sub("", text), flags=re.S)
    return re.sub(r"</?(?:div|code|a|i|img)\b[^>]*>", "", text)


def write_twins(entries):
    "A Markdown twin beside every page, and llms.txt, which lists them."
    lines = [f"# {NAME}", "", f"> {entries[-1].description}", ""]
    for name, (title, _) in SECTIONS.items():
        inside = [e for e in entries if e.name.startswith(f"{name}/")]
        lines += [f"## {'Optional: the library' if name == 'api' else title}", ""]
        lines += [f"- [{e.title}]({e.name}.md): {e.description}" for e in inside] + [""]
    (HTML / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    texts = {entry.name: entry.text for entry in entries}
    for path in SOURCE.rglob("*.md"):
        name = path.relative_to(SOURCE).with_suffix("").as_posix()
        texts.setdefault(name, plain_index(path.read_text(encoding="utf-8")))
    for name, text in texts.items():
        (HTML / f"{name}.md").write_text(re.sub(r"\.ipynb(?=[)#])", ".md", text), encoding="utf-8")
