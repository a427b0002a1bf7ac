"""What a reader sees of a result: the table, the plot, and the figure that matters in words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import report
from bench.peer.fleet import AGAIN, DISAGGREGATED, OURS
from bench.peer.measures import TTFT, Sizes, decode_name


def table(result: Mapping[str, Any], measures: list[str]) -> Table:
    """A row per measure and server: its figure, and pdserve's beside it, colocated and disaggregated."""
    shown = Table(title="medians (lowest-highest), ratios of pdserve over the other [95 %]", title_justify="left")
    for head in ("", "server", "its figure", OURS, "ratio", DISAGGREGATED, "ratio"):
        shown.add_column(head, justify="left" if head in ("", "server") else "right")
    servers, ratios = result["servers"], result["ratios"]
    for measure in measures:
        unit = "ms" if measure == TTFT else "tok/s"
        for name in servers:
            if name == DISAGGREGATED or (name == OURS and len(servers) > 1):
                continue
            cells = [_figure(servers.get(name), measure)]
            for mine in (OURS, DISAGGREGATED):
                cells += [_figure(servers.get(mine), measure), _ratio(ratios, mine, name, measure)]
            shown.add_row(f"{measure}, {unit}", name, *cells)
        shown.add_section()
    starts = {name: each["start_s"] for name, each in servers.items() if "start_s" in each}
    for name, seconds in starts.items():
        if name not in (OURS, AGAIN, DISAGGREGATED):
            cells = [f"{seconds:.1f}"]
            for mine in (OURS, DISAGGREGATED):
                has = mine in starts
                cells += [f"{starts[mine]:.1f}", f"{starts[mine] / seconds:.2f}"] if has else ["", ""]
            shown.add_row("start to first token, s", name, *cells)
    return shown


def _figure(server: Mapping[str, Any] | None, measure: str) -> str:
    if server is None:
        return ""
    if figures := server.get("figures", {}).get(measure):
        return report.show(figures, 0 if figures["median"] >= 100 else 1)
    failed = server["failures"]
    return "not run" if "" in failed else "not comparable" if measure in failed else ""


def _ratio(ratios: Mapping[str, Any], mine: str, theirs: str, measure: str) -> str:
    found = ratios.get(mine, {}).get(theirs, {}).get(measure)
    return "" if found is None else f"{found['median']:.2f} [{found['low_95']:.2f}-{found['high_95']:.2f}]"


def plot(result: Mapping[str, Any], sizes: Sizes, path: Path) -> None:
    """Decode throughput by concurrency, time to first token, time to start."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = [name for name, each in result["servers"].items() if each["figures"]]
    panels_of = [decode_name(c) for c in sizes.concurrency] + [TTFT]
    figure, panels = pyplot.subplots(1, len(panels_of), figsize=(3.2 * len(panels_of), 3.6))
    for axes, measure in zip(panels, panels_of, strict=True):
        for at, name in enumerate(names):
            if values := result["servers"][name]["figures"].get(measure):
                middle = values["median"]
                whiskers = [[middle - values["min"]], [values["max"] - middle]]
                axes.bar(at, middle, 0.7, yerr=whiskers, capsize=3, color=f"C{at}")
        axes.set(title=measure, ylabel="ms" if measure == TTFT else "tokens/s")
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def summary(result: Mapping[str, Any], sizes: Sizes) -> str:
    """The figure that matters, in words."""
    told = []
    for name, ratios in result["ratios"].get(OURS, {}).items():
        found = [ratios.get(decode_name(c)) for c in sizes.concurrency]
        if name not in (AGAIN, DISAGGREGATED) and any(found):
            told.append(f"{name} " + " / ".join("-" if each is None else f"{each['median']:.2f}" for each in found))
    streams = " / ".join(str(c) for c in sizes.concurrency)
    return f"Decode at {streams} streams, pdserve times each peer: {', '.join(told) or 'no peer was run'}."
