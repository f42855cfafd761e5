"""What a dataset holds, as a few rows for a person."""

from pipeline.brief import Brief, look_briefly
from pipeline.store import Store
from schemas.terms import DatasetTerms


def dataset_report(store: Store, terms: DatasetTerms) -> str:
    """The rows of a brief look as text: nothing is verified."""
    rows = brief_rows(look_briefly(store, terms), terms)
    width = max(map(len, rows))
    return "".join(f"{name:{width}}  {value}\n" for name, value in rows.items())


def brief_rows(brief: Brief, terms: DatasetTerms) -> dict[str, str]:
    """What is known without reading the dataset."""
    versions = f"{min(brief.versions)} to {max(brief.versions)}" if brief.versions else "none"
    geometry = terms.geometry
    return {
        "environment": terms.env.env_id,
        "window": f"L {geometry.burn_in}, T {geometry.unroll}, n {geometry.bootstrap}, stride {geometry.stride}, "
        f"K {geometry.frame_stack}",
        "core": f"{terms.core.kind} {terms.core.layers} x {terms.core.width}",
        "collectors": f"{brief.collectors}",
        "shards": f"{brief.shards:,} ({brief.bytes / 1e6:,.1f} MB)",
        "sequences": f"{brief.sequences:,}",
        "env steps": f"{brief.env_steps:,}",
        "digest": brief.digest,
        f"in {brief.opened_shards} shards opened": f"parameter versions {versions}, {len(brief.lineages)} networks"
        + (f", {brief.unreadable_shards} unreadable" if brief.unreadable_shards else ""),
    }
