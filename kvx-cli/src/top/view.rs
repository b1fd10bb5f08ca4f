//! One frame of `kvx top`, as text.

use std::collections::BTreeMap;
use std::time::Duration;

use kvx_connector::observe::RankStatus;

use super::fetch::plain;
use super::sums::Sums;
use crate::metrics::Page;
use crate::output;
use crate::size;

/// Most rows of a table.
const ROWS: usize = 16;

/// A frame. Rates are since an earlier look, where there was one.
pub(super) fn frame(
    address: &str,
    page: &Page,
    sums: &Sums,
    since: Option<(&Sums, Duration)>,
) -> String {
    let mut parts = vec![
        format!(
            "kvx {} at {address}, up {}: {}, {}",
            plain(&page.version),
            time(sums.up_ms),
            size::of_many(sums.ranks, "rank"),
            size::of_many(sums.peers_connected, "connected peer"),
        ),
        totals(sums, since),
        ranks(page),
    ];
    parts.extend(peers(page));
    parts.extend(requests(page));
    for (what, counts) in [
        ("requests failed", &sums.failures),
        ("leases ended", &sums.ends),
        ("connections refused", &sums.refused),
    ] {
        parts.extend(listed(what, counts));
    }
    parts.join("\n\n")
}

/// One of the sums.
type Count = fn(&Sums) -> u64;

fn totals(sums: &Sums, since: Option<(&Sums, Duration)>) -> String {
    let mut table = output::table(&["", "in all", "per second"], 1);
    let rate = |now: u64, of: Count| {
        let (before, time) = since?;
        let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1);
        // A rank that was started again has counted from nothing.
        Some(now.saturating_sub(of(before)).saturating_mul(1000) / millis)
    };
    let shown = |rate: Option<u64>, how: fn(u64) -> String| rate.map_or_else(|| "-".into(), how);
    let of: Count = |sums| sums.bytes;
    table.add_row([
        "moved".into(),
        size::bytes(sums.bytes),
        shown(rate(of(sums), of), size::bytes),
    ]);
    let rows: [(&str, Count); 7] = [
        ("transfers", |sums| sums.transfers),
        ("requests asked for", |sums| sums.asked),
        ("requests ready", |sums| sums.ready),
        ("requests failed", |sums| sums.failed),
        ("of them, stale reads", |sums| sums.stale_reads),
        ("leases granted", |sums| sums.granted),
        ("leases freed", |sums| sums.freed),
    ];
    for (name, of) in rows {
        let count = of(sums);
        table.add_row([name.into(), size::count(count), shown(rate(count, of), size::count)]);
    }
    let transports: Vec<String> = sums
        .transports
        .iter()
        .map(|(name, bytes)| format!("{} by {}", size::bytes(*bytes), plain(name)))
        .collect();
    match transports.is_empty() {
        true => table.trim_fmt(),
        false => format!("{}\n\n{}", table.trim_fmt(), transports.join(", ")),
    }
}

fn all(page: &Page) -> impl Iterator<Item = &RankStatus> {
    page.engines.iter().flat_map(|engine| &engine.ranks)
}

fn ranks(page: &Page) -> String {
    let heads = [
        "rank",
        "peers",
        "leases",
        "over",
        "oldest",
        "requests",
        "routing",
        "quarantined",
        "queued",
    ];
    let mut table = output::table(&heads, 1);
    for rank in all(page).take(ROWS) {
        let (leases, requests) = (&rank.leases, &rank.requests);
        let kept = rank.quarantine.request_blocks + rank.quarantine.lease_blocks;
        table.add_row([
            format!("{} {}.{}", plain(&rank.engine), rank.replica, rank.rank),
            format!("{}/{}", rank.peers_connected, rank.peers_known),
            size::count(leases.held),
            size::count(leases.draining + leases.quarantined),
            leases.oldest_ms.map_or_else(|| "-".into(), time),
            size::count(requests.active + requests.quarantined),
            size::count(requests.routing),
            size::of_many(kept, "block"),
            size::bytes(rank.queued_bytes),
        ]);
    }
    more(table.trim_fmt(), all(page).count())
}

fn peers(page: &Page) -> Option<String> {
    let mut table = output::wrapped(&["peer", "of", "is", "for", "by", "last error"]);
    let peers = || all(page).flat_map(|rank| rank.peers.iter().map(move |peer| (rank, peer)));
    for (rank, peer) in peers().take(ROWS) {
        let by = [&peer.backend, &peer.transport];
        let by: Vec<String> = by.into_iter().flatten().map(|name| plain(name)).collect();
        table.add_row([
            format!("{} {}.{}", plain(&peer.engine), peer.replica, peer.rank),
            format!("{}.{}", rank.replica, rank.rank),
            plain(&peer.state),
            time(peer.for_ms),
            by.join("/"),
            peer.last_error.as_deref().map_or_else(String::new, plain),
        ]);
    }
    let count = peers().count();
    (count > 0).then(|| more(table.trim_fmt(), count))
}

fn requests(page: &Page) -> Option<String> {
    let mut table = output::table(&["request", "from or to", "is", "age", "moved"], 3);
    let mut requests: Vec<_> = all(page).flat_map(|rank| &rank.requests.oldest).collect();
    requests.sort_by_key(|request| std::cmp::Reverse(request.age_ms));
    for request in requests.iter().take(ROWS) {
        table.add_row([
            plain(&request.key),
            plain(&request.engine),
            plain(&request.state),
            time(request.age_ms),
            size::bytes(request.bytes),
        ]);
    }
    (!requests.is_empty()).then(|| more(table.trim_fmt(), requests.len()))
}

fn listed(what: &str, counts: &BTreeMap<String, u64>) -> Option<String> {
    let counts: Vec<String> = counts
        .iter()
        .map(|(name, count)| format!("{} {}", size::count(*count), plain(name)))
        .collect();
    (!counts.is_empty()).then(|| format!("{what}: {}", counts.join(", ")))
}

/// A table, and how many rows it does not show.
fn more(table: String, count: usize) -> String {
    match count.saturating_sub(ROWS) {
        0 => table,
        hidden => format!("{table}\nand {} more", size::count(hidden as u64)),
    }
}

/// A time as people say it.
fn time(millis: u64) -> String {
    let seconds = millis / 1000;
    match seconds {
        0 => format!("{millis} ms"),
        1..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}
