//! `docs/metrics.md` lists the metrics that there are.

use std::collections::BTreeSet;

use kvx_connector::observe::METRICS;

const DOCUMENT: &str = include_str!("../../../docs/metrics.md");

#[test]
fn the_document_lists_each_metric_and_no_other() {
    let rows: BTreeSet<(String, String, String, String)> = DOCUMENT
        .lines()
        .filter_map(|line| line.strip_prefix("| `kvx_"))
        .filter_map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            // Tables of other things have fewer columns.
            let [name, kind, unit, labels, meaning, ..] = cells[..] else { return None };
            assert!(meaning.len() > 10, "{name} has no meaning");
            let name = format!("kvx_{}", name.trim_end_matches('`'));
            Some((name, kind.into(), unit.into(), labels.replace('`', "")))
        })
        .collect();
    let metrics: BTreeSet<(String, String, String, String)> = METRICS
        .iter()
        .map(|metric| {
            let labels = metric.labels.join(", ");
            let unit = metric.unit.as_str().to_owned();
            (metric.name.into(), metric.kind.as_str().into(), unit, labels)
        })
        .collect();
    assert_eq!(metrics.len(), METRICS.len(), "two metrics of one name");
    let missing: Vec<_> = metrics.difference(&rows).collect();
    let unknown: Vec<_> = rows.difference(&metrics).collect();
    assert!(missing.is_empty(), "not in docs/metrics.md, or otherwise: {missing:#?}");
    assert!(unknown.is_empty(), "in docs/metrics.md, and not recorded: {unknown:#?}");
}
