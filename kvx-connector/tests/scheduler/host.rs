//! Caches that go through a buffer of the host, by the engine's copy functions.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvx_connector::scheduler::FinishStatus;
use kvx_connector::worker::connector::{CopyBlocks, CopyJob, Direction};
use kvx_core::layout::RankLayout;
use kvx_core::memory::Region;
use kvx_core::{Error, ErrorKind, Result, Retry};

use crate::bytes::copy_blocks;
use crate::kit::{Seat, Shape, both_idle, pair, until};

/// What goes wrong with copies.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// So many of the next copies to the host, or from it, fail.
    to_host: AtomicU32,
    pub(crate) from_host: AtomicU32,
    /// Copies are begun, and end when they are told to.
    later: AtomicBool,
    begun: Mutex<Vec<(CopyJob, Memory)>>,
}

/// A layout, the engine's memory, the host's.
type Memory = (RankLayout, Vec<Region>, Vec<Region>);

impl Faults {
    /// From now on copies are begun, and end when they are told to.
    pub(crate) fn set_later(&self) {
        self.later.store(true, Ordering::Relaxed);
    }

    /// Ends all copies that a rank has begun; how many these were.
    pub(crate) fn end(&self, seat: &Seat) -> usize {
        let rank = seat.layout.coords().replica_index();
        let mut all = self.begun.lock().unwrap();
        let (begun, others) = std::mem::take(&mut *all)
            .into_iter()
            .partition::<Vec<_>, _>(|(_, (layout, ..))| layout.coords().replica_index() == rank);
        *all = others;
        drop(all);
        let (count, worker) = (begun.len(), &seat.worker);
        for (job, (layout, device, host)) in begun {
            run(&job, &layout, &device, &host);
            worker.copied(job.number, Ok(()));
        }
        count
    }
}

fn run(job: &CopyJob, layout: &RankLayout, device: &[Region], host: &[Region]) {
    let (from, to) = match job.direction {
        Direction::ToHost => (device, host),
        Direction::FromHost => (host, device),
    };
    copy_blocks(layout, &job.tables, from, to);
}

/// The copy functions of the engine.
#[derive(Debug)]
pub(crate) struct HostCopies {
    pub(crate) layout: RankLayout,
    pub(crate) device: Vec<Region>,
    pub(crate) host: Vec<Region>,
    pub(crate) faults: Arc<Faults>,
}

impl CopyBlocks for HostCopies {
    fn copy(&mut self, job: &CopyJob) -> Option<Result<()>> {
        let failing = match job.direction {
            Direction::ToHost => &self.faults.to_host,
            Direction::FromHost => &self.faults.from_host,
        };
        if failing.load(Ordering::Relaxed) > 0 {
            failing.fetch_sub(1, Ordering::Relaxed);
            let error = Error::new(ErrorKind::Fabric, "copy", "the device is busy");
            return Some(Err(error.with_retry(Retry::Backoff)));
        }
        if self.faults.later.load(Ordering::Relaxed) {
            let memory = (self.layout.clone(), self.device.clone(), self.host.clone());
            self.faults.begun.lock().unwrap().push((job.clone(), memory));
            return None;
        }
        run(job, &self.layout, &self.device, &self.host);
        Some(Ok(()))
    }
}

fn hosted(block: u32) -> Shape {
    Shape { host: true, ..Shape::new(1, 1, block) }
}

/// Known failure 32 (vllm PR#30419): every chunk of a prompt is copied to the host, not the first alone. On both sides, with blocks
/// of other sizes, and one side only.
#[test]
fn all_chunks_go_through_the_hosts_buffers() {
    for (from, to) in [
        (hosted(16), hosted(64)),
        (hosted(16), Shape::new(2, 1, 16)),
        (Shape::new(1, 1, 16), hosted(16)),
    ] {
        let (mut p, mut d) = pair(&from, &to);
        let params = p.prefill("p", 100, 40, 7);
        d.arrive("d", 100, &params, 7);
        assert_eq!(d.admit("d", 0), 100);
        until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
        d.decoded("d", 99);
        both_idle(&mut p, &mut d);
    }
}

/// What is copied later is published later: a reader that comes before waits, and reads what was copied.
#[test]
fn nothing_is_read_before_it_is_in_the_hosts_buffer() {
    let (mut p, mut d) = pair(&hosted(16), &Shape::new(1, 1, 16));
    let from = Arc::clone(&p.faults);
    from.set_later();
    let params = p.prefill("p", 40, 16, 7);
    d.arrive("d", 40, &params, 7);
    d.admit("d", 0);
    for _ in 0..20 {
        p.step();
        d.step();
        d.seats[0].worker.wait_for_report(Duration::from_millis(10));
    }
    assert!(d.received.is_empty() && d.failed.is_empty());
    assert_eq!(from.end(&p.seats[0]), 3);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    d.decoded("d", 39);
    both_idle(&mut p, &mut d);
}

/// A copy to the host that fails ends the lease, and nobody reads what is not there.
#[test]
fn a_failed_copy_to_the_host_fails_the_reader_and_frees_the_blocks() {
    let (mut p, mut d) = pair(&hosted(16), &Shape::new(1, 1, 16));
    p.faults.to_host.store(1, Ordering::Relaxed);
    let params = p.prefill("p", 40, 16, 7);
    d.arrive("d", 40, &params, 7);
    d.admit("d", 0);
    until(&mut p, &mut d, "failed", |_, d| d.failed.contains_key("d"));
    let failed = &d.failed["d"];
    assert!(failed.reason.contains("stage"), "{}", failed.reason);
    assert_eq!(failed.blocks.len(), 3);
    d.finish("d", FinishStatus::Failed);
    both_idle(&mut p, &mut d);
}

/// What was loaded and could not be copied is copied again, not read again: its lease is over.
#[test]
fn a_failed_copy_from_the_host_is_tried_again_without_reading_again() {
    let (mut p, mut d) = pair(&Shape::new(1, 1, 16), &hosted(16));
    d.faults.from_host.store(1, Ordering::Relaxed);
    let params = p.prefill("p", 40, 40, 7);
    d.arrive("d", 40, &params, 7);
    d.admit("d", 0);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    d.decoded("d", 39);
    assert_eq!(d.c.stats().retries, 1);
    let stats = d.seats[0].worker.stats();
    assert_eq!((stats.loads, stats.failed_loads), (1, 1));
    both_idle(&mut p, &mut d);
}

/// A request that is aborted while it is copied from the host ends once the copy is over.
#[test]
fn blocks_are_not_free_while_they_are_copied_into() {
    let (mut p, mut d) = pair(&Shape::new(1, 1, 16), &hosted(16));
    d.faults.set_later();
    let params = p.prefill("p", 40, 40, 7);
    d.arrive("d", 40, &params, 7);
    d.admit("d", 0);
    let faults = Arc::clone(&d.faults);
    until(&mut p, &mut d, "copying", |_, _| !faults.begun.lock().unwrap().is_empty());
    assert!(d.finish("d", FinishStatus::Aborted).hold);
    for _ in 0..10 {
        d.step();
    }
    assert!(d.held.contains_key("d"));
    assert_eq!(faults.end(&d.seats[0]), 1);
    both_idle(&mut p, &mut d);
}
