//! Spreads work over the processor's cores.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use kvx_core::{Error, ErrorKind, Result};

use super::work::Worker;

/// Does `work` with every item, on as many threads as there are cores; results are in the items' order. Each thread has a
/// [`Worker`] of its own.
pub(crate) fn spread<I: Sync, T: Send>(
    items: &[I],
    work: impl Fn(&mut Worker, &I) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let cores = thread::available_parallelism().map_or(1, usize::from).min(items.len()).max(1);
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, Result<T>)>> = Mutex::new(Vec::with_capacity(items.len()));
    let run = || {
        let mut worker = Worker::default();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { break };
            let result = work(&mut worker, item);
            done.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
        }
    };
    let whole = thread::scope(|scope| {
        // Where there is no thread to be had, those that there are do all of it.
        let others: Vec<_> = (1..cores)
            .map_while(|_| thread::Builder::new().spawn_scoped(scope, run).ok())
            .collect();
        run();
        others.into_iter().all(|other| other.join().is_ok())
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    if !whole || done.len() != items.len() {
        return Err(Error::new(ErrorKind::Internal, "demo", "a worker thread ended early"));
    }
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_order_and_errors_are_kept() {
        let items: Vec<u64> = (0..100).collect();
        assert_eq!(spread(&items, |_, item| Ok(item * 2)).unwrap()[7], 14);
        assert!(spread::<u64, ()>(&[], |_, _| Ok(())).unwrap().is_empty());
        let fails = spread(&items, |_, item| match item {
            63 => Err(Error::misuse("test", "63")),
            _ => Ok(()),
        });
        assert!(fails.unwrap_err().to_string().contains("63"));
    }
}
