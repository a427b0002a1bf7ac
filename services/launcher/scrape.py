"""Numbers from a process's /metrics."""

from __future__ import annotations

import httpx2
from prometheus_client.parser import text_string_to_metric_families


class Samples:
    """One scrape."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name (`..._total` for a counter) with these labels; 0 where there is none."""
        return sum(s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items())


def scrape(base_url: str) -> Samples:
    """Reads `base_url`/metrics. Raises httpx2.HTTPError."""
    return Samples(httpx2.get(f"{base_url}/metrics", timeout=10.0, trust_env=False).raise_for_status().text)
