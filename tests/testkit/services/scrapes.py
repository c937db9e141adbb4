"""Pages of metrics, parsed as Prometheus does."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from turnstream_server.telemetry.instruments import REGISTRY


class Scrape(dict[str, dict[tuple[str, ...], float]]):
    """Values by the name of a sample, and by the values of its labels in order of their names."""

    def value(self, name: str, *labels: str) -> float:
        """One value; 0 where there is none."""
        return self.get(name, {}).get(labels, 0.0)


def scraped(text: str) -> Scrape:
    """Return the samples of a page; a sample that is there twice is an error."""
    found = Scrape()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            values = found.setdefault(sample.name, {})
            assert labels not in values, sample
            values[labels] = sample.value
    return found


def own_scrape() -> Scrape:
    """Return the samples of this process."""
    return scraped(generate_latest(REGISTRY).decode())
