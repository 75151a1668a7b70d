"""Sections whose experiments give rows that carry their own verdict: `passed` in a row, or in a step."""

from scripts.gpu.report.documents import Section, failed_steps, opened, table, verdict

WHAT = {
    "tp2": "A model on two GPUs, beside the same on one: paths of every step on both ranks, and texts.",
    "mla": "MLA + MoE of the DeepSeek-V3 / Kimi K2 family, tiny and random, with a draft.",
    "long": "Clients of all kinds, batches of every graph size, and what is left afterwards.",
    "tool": "Every command on an environment and a server of its own.",
    "refusals": "Requests and start-up arguments that a tree cannot serve, and what the server says.",
}

# Steps without which an experiment is not complete.
STEPS = {
    "tp2": ("paths", "greedy", "exact", "a rank that commits another token"),
    "mla": ("greedy", "cached", "diverse", "exact"),
    "long": ("cold and warm", "load", "cold and warm, after"),
    "tool": ("apply", "verify", "smoke-test", "status", "revert", "files"),
    "refusals": ("requests", "start-up"),
}
WIDEST = 9  # columns
# Columns that are left to the JSON file: the whole reply of a command of the tool.
LEFT_OUT = ("output",)


def section(name: str, document: dict) -> Section:
    result = document["result"]
    found = opened(name, document, WHAT[name])
    thresholds, cases = result.get("thresholds", {}), []
    if thresholds:
        found.lines += ["Thresholds: " + "; ".join(f"{k}: {v}" for k, v in thresholds.items()) + ".", ""]
    for step, value in result.items():
        if step in ("servers", "thresholds") or (isinstance(value, dict) and "failed" in value):
            continue
        found.lines += [f"**{step}**", ""]
        rows = [{key: part for key, part in row.items() if key not in LEFT_OUT} for row in _rows(value)]
        if rows:
            found.lines += _table(rows)
        else:
            found.lines += [_cell(value), ""]
        judged = [row["passed"] for row in rows if "passed" in row]
        value = value if isinstance(value, dict) else {}
        if "exit" in value:  # a command of the tool
            found.rows.append((f"{name}: {step}", "", "exit 0", f"exit {value['exit']}", value["exit"] == 0))
        if "batch_steps" in value:
            wanted = thresholds["steps"]
            found.rows.append(
                (
                    f"{name}: decode steps",
                    f"{len(rows)} servers",
                    f">= {wanted:,}",
                    f"{value['batch_steps']:,}",
                    value["batch_steps"] >= wanted,
                )
            )
        if "different" in value:
            different = value["different"]
            said = f"{different} of {value['files']:,}"
            found.rows.append((f"{name}: files after revert", "", "none differs", said, not different))
        if judged:
            count, samples = sum(judged), sorted({row["n"] for row in rows if "n" in row})
            n = f"{len(judged)} cases" + (f" of {samples[0]:,}" if samples else "")
            found.rows.append((f"{name}: {step}", n, "every case", f"{count} of {len(judged)}", count == len(judged)))
            cases += judged
    if cases:
        found.found = f"{sum(cases)} of {len(cases)} cases"
    else:
        found.found = ", ".join(f"{row[0].partition(': ')[2]} {row[3]}" for row in found.rows)
    found.missing += [f"{name}: {step}" for step in STEPS[name] if step not in result]
    problems = failed_steps(result)
    found.lines += [f"- failed: {line}" for line in problems]
    found.rows += [(f"{name}: {line.split(':')[0]}", "", "", "the step failed", False) for line in problems]
    return found


def _rows(value: object) -> list[dict]:
    """Rows of a step: a list of them, its "rows", {name: row}, or the step itself."""
    if isinstance(value, list):
        return [row for row in value if isinstance(row, dict)]
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("rows"), list):
        return _rows(value["rows"])
    if value and all(isinstance(row, dict) for row in value.values()):
        return [{"name": name} | row for name, row in value.items()]
    return [value]


def _table(rows: list[dict]) -> list[str]:
    """A line a row, or, where rows have much to say, a column."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key != "passed"))
    if len(keys) <= WIDEST:
        return table((*keys, ""), [(*(_cell(row.get(key, "")) for key in keys), *_verdict(row)) for row in rows])
    first, *rest = keys
    header = (first, *(_cell(row.get(first, "")) for row in rows))
    lines = [(key, *(_cell(row.get(key, "")) for row in rows)) for key in rest]
    return table(header, [*lines, ("", *(word for row in rows for word in _verdict(row)))])


def _verdict(row: dict) -> tuple[str]:
    return (verdict(row["passed"]) if "passed" in row else "",)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(part)}" for key, part in value.items())
    if isinstance(value, list):
        if value and isinstance(value[0], dict) and "margin" in value[0]:  # where texts part
            margins = [parted["margin"] for parted in value]
            return f"{len(value)}, margins to {max(margins):.3f}"
        return ", ".join(_cell(part) for part in value[:12]) + (", ..." if len(value) > 12 else "")
    return str(value).replace("\n", " ")[:300]
