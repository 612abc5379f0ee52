"""Parses a scrape of /metrics into its families, and into series by name and labels."""

from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, tuple[tuple[str, str], ...]]  # name, labels in order


def families_of(text: str) -> dict[str, Metric]:
    """Return the families by name, counters without their _total."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def series_of(families: Iterable[Metric]) -> dict[Series, float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def total(series: dict[Series, float], name: str, **labels: str) -> float:
    """Return the sum over the series of that name that have these labels."""
    wanted = labels.items()
    return sum(
        value for (each, had), value in series.items() if each == name and wanted <= set(had)
    )
