//! Copies that go on while something else is measured.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use kvx_core::limits::{self, Wanted};
use kvx_core::memory::Region;
use kvx_core::thread::gives_way;
use kvx_core::{Error, ErrorKind, Result};

/// Bytes that each core copies, again and again.
const BYTES: u64 = 64 << 20;

/// Bytes that all of them copy, and have copied.
pub(super) fn bytes() -> u64 {
    2 * BYTES * cores() as u64
}

fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Ends the copies, however what is measured beside them ends.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Measures while a thread of this niceness for every core copies.
pub(super) fn while_every_core_copies<T>(
    niceness: u8,
    measure: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let stop = AtomicBool::new(false);
    let regions = (0..2 * cores()).map(|_| Region::host(BYTES)).collect::<Result<Vec<Region>>>()?;
    thread::scope(|scope| {
        let _ends = Ends(&stop);
        for pair in regions.chunks_exact(2) {
            let stop = &stop;
            let copies = move || {
                gives_way(niceness);
                while !stop.load(Ordering::Relaxed)
                    && pair[0].copy_to(0, &pair[1], 0, BYTES).is_ok()
                {}
            };
            let thread = thread::Builder::new().name("kvx-bench-busy".into());
            thread.spawn_scoped(scope, copies).map_err(|refused| {
                let error = Error::new(ErrorKind::Resources, "bench", "no thread to be had");
                limits::explain(error, refused, Wanted::Thread)
            })?;
        }
        measure()
    })
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// Whoever waits for the threads waits for ever if nobody ends them.
    #[test]
    fn copies_end_however_the_measurement_ends() {
        assert_eq!(while_every_core_copies(0, || Ok(7)).unwrap(), 7);
        let failed = while_every_core_copies::<()>(0, || Err(Error::misuse("test", "63")));
        assert!(failed.unwrap_err().to_string().contains("63"));
        let panics = || while_every_core_copies::<()>(19, || panic!("of the measurement"));
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
    }
}
