"""What pdserve has to reach beside each peer, and whether it did."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.peer.measures import TTFT, decode_name

DECODE_LEAST = {  # pdserve's decode throughput over the peer's, median of paired rounds, by concurrency
    "vllm": {1: 1.15, 8: 1.4, 32: 1.5},
    "vllm-float32": {1: 1.15, 8: 1.4, 32: 1.5},  # where a processor has no bf16 instructions, this is the faster one
    "llama-bf16": {1: 1.1, 8: 2.0, 32: 2.5},
    "llama-q4_1": {32: 1.0},
}
TTFT_MOST = 1.1  # pdserve's time to the first token over vLLM's: the upper end of the 95 % interval
START_MOST = 0.1  # pdserve's time from process start to first token over vLLM's
Ratios = Mapping[str, Mapping[str, Mapping[str, Any]]]  # peer, measure: see `paired.compare`


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure, and the least or the most it has to be. Without a figure: why there is none."""

    name: str
    value: float | None
    least: float | None = None
    most: float | None = None
    why_not_run: str = ""
    asked_for: bool = True  # a bar that this run was never to judge cannot fail it

    @property
    def verdict(self) -> str:
        """met, missed, or not run."""
        if self.value is None:
            return "not run"
        met = (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)
        return "met" if met else "missed"

    @property
    def fails(self) -> bool:
        """Whether --check fails for it."""
        return self.verdict == "missed" or (self.verdict == "not run" and self.asked_for)

    @property
    def line(self) -> str:
        """The verdict as a line."""
        limit = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        if self.value is None:
            return f"not run: {self.name} ({limit}): {self.why_not_run}"
        return f"{self.verdict + ':':<8} {self.name} is {self.value:.2f}, the bar is {limit}"

    def told(self) -> dict[str, Any]:
        """For result.json."""
        return {**asdict(self), "verdict": self.verdict}


def judge(
    ratios: Ratios, starts: Mapping[str, float], failures: Mapping[str, Mapping[str, str]], asked: Collection[str]
) -> list[Bar]:
    """All bars. `starts` and `ratios` are pdserve's over each peer's; `failures` says why one is missing ("": all)."""

    def why(peer: str, measure: str) -> tuple[str, bool]:
        if peer not in asked:
            return "not among the servers asked for", False
        found = failures.get(peer, {})
        if said := found.get("") or found.get(measure) or failures.get("pdserve", {}).get(measure):
            return said, True
        return "not measured with these flags", False

    def bar(
        peer: str, measure: str, name: str, value: float | None, least: float | None = None, most: float | None = None
    ) -> Bar:
        if value is not None:
            return Bar(name, value, least, most)
        return Bar(name, None, least, most, *why(peer, measure))

    found = []
    for peer, by_concurrency in DECODE_LEAST.items():
        for concurrency, least in by_concurrency.items():
            measure = decode_name(concurrency)
            median = ratios.get(peer, {}).get(measure, {}).get("median")
            name = f"decode at {concurrency}, times {peer}"
            found.append(bar(peer, measure, name, median, least=least))
    for peer in ("vllm", "vllm-float32"):
        high = ratios.get(peer, {}).get(TTFT, {}).get("high_95")
        name = f"first token of 512, over {peer}'s, upper end of 95 %"
        found.append(bar(peer, TTFT, name, high, most=TTFT_MOST))
        found.append(bar(peer, "", f"start to first token, over {peer}'s", starts.get(peer), most=START_MOST))
    return found
