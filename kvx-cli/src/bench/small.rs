//! Times of what is small: one block, a notification; and rates over sizes.

use std::time::{Duration, Instant};

use kvx_core::thread::runs_briefly;
use kvx_core::transfer::Segment;
use kvx_core::{Error, ErrorKind, Result};
use serde::Serialize;

use super::busy::while_every_core_copies;
use super::rig::Rig;
use super::stats::{Quantiles, median};
use crate::remote::PATIENCE;
use crate::remote::pinned::{self, Pinned};

/// Rounds of one point of a sweep.
const SWEEP_ROUNDS: usize = 7;
/// Bytes of the request in the sweep over segment sizes.
const SWEEP_BYTES: u64 = 64 << 20;

/// Times of notifications there and back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Notify {
    /// Both sides asleep, the machine otherwise idle.
    pub(crate) idle: Option<Quantiles>,
    /// The same while every core copies.
    pub(crate) busy: Option<Quantiles>,
    /// Both sides poll without pause.
    pub(crate) spin: Option<Quantiles>,
    /// The least there is: two counters (`eventfd`) between the same two processes, the machine otherwise idle.
    pub(crate) raw_idle: Option<Quantiles>,
    /// The same while every core copies.
    pub(crate) raw_busy: Option<Quantiles>,
    /// While every core copies, with both sides' threads that wait on one of them.
    pub(crate) busy_together: Option<Quantiles>,
    pub(crate) raw_busy_together: Option<Quantiles>,
}

/// Rates over sizes.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Sweep {
    /// Bytes per segment, and GB/s.
    pub(crate) segments: Vec<(u64, f64)>,
    /// Bytes per request, and GB/s.
    pub(crate) requests: Vec<(u64, f64)>,
}

/// Moves the first segment, at most a block of one tensor, again and again.
pub(crate) fn one_block(rig: &mut Rig<'_>, times: u32) -> Result<Option<Quantiles>> {
    let Some(link) = rig.links.first() else { return Ok(None) };
    let rank = &rig.ranks.list()[link.here];
    let Some(first) = link.segments.first() else { return Ok(None) };
    let span = rank.layout.tensors().first().and_then(|tensor| tensor.block_span());
    let segment = Segment { bytes: first.bytes.min(span.unwrap_or(first.bytes)), ..*first };
    let mut all = Vec::new();
    for _ in 0..times {
        let begun = Instant::now();
        let transfer =
            rank.port.transfer(link.peer, rig.engines.mode, &rank.set, &[segment], None)?;
        rig.process.settle(transfer, || late("a block"))?;
        all.push(begun.elapsed());
    }
    Ok(Quantiles::of(all))
}

/// Sends notifications there and back.
pub(crate) fn notify(rig: &mut Rig<'_>, times: u32) -> Result<Notify> {
    let raw_idle = raw(rig, times, None)?;
    let idle = asleep(rig, times, None)?;
    let spin = spinning(rig, times)?;
    // What copies meanwhile is as nice as the backend's own threads that copy.
    let niceness = rig.fabric.options().value("copy_nice")?.unwrap_or(0);
    let [apart, together] = while_every_core_copies(niceness, || {
        let mut both = |cpu| Ok::<_, Error>([raw(rig, times, cpu)?, asleep(rig, times, cpu)?]);
        Ok([both(None)?, pinned::any().map_or(Ok([None, None]), |cpu| both(Some(cpu)))?])
    })?;
    let ([raw_busy, busy], [raw_busy_together, busy_together]) = (apart, together);
    Ok(Notify { idle, busy, spin, raw_idle, raw_busy, busy_together, raw_busy_together })
}

/// Wakes the other process and is woken by it without a backend, on the threads that do so with one.
#[cfg(target_os = "linux")]
fn raw(rig: &mut Rig<'_>, times: u32, cpu: Option<u32>) -> Result<Option<Quantiles>> {
    runs_briefly();
    let _pinned = Pinned::to(cpu);
    Ok(Quantiles::of(rig.process.raw(times, cpu)?))
}

#[cfg(not(target_os = "linux"))]
fn raw(_: &mut Rig<'_>, _: u32, _: Option<u32>) -> Result<Option<Quantiles>> {
    Ok(None)
}

fn asleep(rig: &mut Rig<'_>, times: u32, cpu: Option<u32>) -> Result<Option<Quantiles>> {
    let Some(link) = rig.links.first() else { return Ok(None) };
    // As a thread should that waits for notifications. Threads that copy have been started, or do not inherit it.
    runs_briefly();
    let _pinned = Pinned::to(cpu);
    rig.process.echo(link.there, link.here, times, false, cpu)?;
    let rank = &rig.ranks.list()[link.here];
    let times = rig.process.beside(&rig.fabric.runtime, async {
        let mut all = Vec::new();
        for _ in 0..times {
            let begun = Instant::now();
            let sent =
                rank.port.transfer(link.peer, rig.engines.mode, &rank.set, &[], Some(b"ping"))?;
            let heard = tokio::time::timeout(PATIENCE, rank.port.notified()).await;
            heard.map_err(|_| late("a notification"))??;
            all.push(begun.elapsed());
            sent.await?;
        }
        Ok::<_, Error>(all)
    })?;
    rig.process.finish()?;
    Ok(Quantiles::of(times))
}

fn spinning(rig: &mut Rig<'_>, times: u32) -> Result<Option<Quantiles>> {
    let Some(link) = rig.links.first() else { return Ok(None) };
    rig.process.echo(link.there, link.here, times, true, None)?;
    let rank = &rig.ranks.list()[link.here];
    let mut all = Vec::new();
    for _ in 0..times {
        let begun = Instant::now();
        let sent =
            rank.port.transfer(link.peer, rig.engines.mode, &rank.set, &[], Some(b"ping"))?;
        rig.process.spin_notified(&rank.port)?;
        all.push(begun.elapsed());
        rig.process.settle(sent, || late("a notification"))?;
    }
    rig.process.finish()?;
    Ok(Quantiles::of(all))
}

/// Rates over the size of segments, and over the size of requests of the rig's own segments.
pub(crate) fn sweep(rig: &mut Rig<'_>) -> Result<Sweep> {
    let Some(link) = rig.links.first() else { return Ok(Sweep::default()) };
    let mut sweep = Sweep::default();
    let all = link.segments.clone();
    let mut count = 1;
    while count < all.len() * 2 {
        let part = &all[..count.min(all.len())];
        let bytes = part.iter().map(|segment| segment.bytes).sum();
        sweep.requests.push((bytes, rate(rig, part)?));
        count *= 2;
    }
    for shift in 8..=24 {
        let bytes = 1_u64 << shift;
        let cut = cut(&all, bytes);
        if !cut.is_empty() {
            sweep.segments.push((bytes, rate(rig, &cut)?));
        }
    }
    Ok(sweep)
}

/// Segments of `bytes` bytes each out of longer ones, every second one, so that none continues another.
fn cut(all: &[Segment], bytes: u64) -> Vec<Segment> {
    let mut cut = Vec::new();
    let mut left = SWEEP_BYTES;
    for segment in all {
        let mut at = 0;
        while at + bytes <= segment.bytes && left >= bytes {
            let (local_offset, remote_offset) =
                (segment.local_offset + at, segment.remote_offset + at);
            cut.push(Segment { local_offset, remote_offset, bytes, ..*segment });
            at += 2 * bytes;
            left -= bytes;
        }
    }
    cut
}

#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn rate(rig: &mut Rig<'_>, segments: &[Segment]) -> Result<f64> {
    let Some(link) = rig.links.first() else { return Ok(0.0) };
    let (rank, mode) = (&rig.ranks.list()[link.here], rig.engines.mode);
    let bytes: u64 = segments.iter().map(|segment| segment.bytes).sum();
    let mut rates = Vec::new();
    for _ in 0..=SWEEP_ROUNDS {
        let begun = Instant::now();
        let transfer = rank.port.transfer(link.peer, mode, &rank.set, segments, None)?;
        rig.process.settle(transfer, || late("a sweep"))?;
        rates.push(bytes as f64 / begun.elapsed().as_secs_f64() / 1e9);
    }
    // The first warms up.
    Ok(median(rates.split_off(1)).unwrap_or_default())
}

fn late(what: &str) -> Error {
    Error::new(ErrorKind::Fabric, "bench", format!("{what} did not settle in time"))
        .with_context("seconds", Duration::as_secs(&PATIENCE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cut_segments_are_inside_and_never_continue_one_another() {
        let long = Segment {
            local_region: 1,
            remote_region: 2,
            local_offset: 100,
            remote_offset: 900,
            bytes: 1000,
        };
        let parts = cut(&[long, long], 300);
        assert_eq!(parts.len(), 4);
        assert_eq!(
            (parts[1].local_offset, parts[1].remote_offset, parts[1].bytes),
            (700, 1500, 300)
        );
        assert!(cut(&[long], 1001).is_empty());
    }
}
