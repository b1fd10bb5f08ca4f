//! What kvx has to say, for Python's `logging`.
//!
//! Threads of kvx put records into a queue, which is bounded, and never wait; a thread of Python takes them out.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use kvx_core::Error;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tracing::Level;

use crate::error;

mod subscriber;

use subscriber::Forward;

/// Most records that wait. What comes then is counted, and lost.
const WAITING: usize = 10_000;

static QUEUE: Queue = Queue {
    inside: Mutex::new(Inside { records: VecDeque::new(), lost: 0, open: false }),
    changed: Condvar::new(),
};

struct Queue {
    inside: Mutex<Inside>,
    changed: Condvar,
}

struct Inside {
    records: VecDeque<Record>,
    lost: u64,
    /// Whether somebody takes records out.
    open: bool,
}

/// Something that was said.
pub(super) struct Record {
    level: Level,
    target: &'static str,
    text: String,
    at: SystemTime,
    thread: Option<String>,
    place: (Option<&'static str>, Option<u32>),
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, record: Record) {
        let mut inside = self.lock();
        if !inside.open {
            return;
        }
        if inside.records.len() == WAITING {
            inside.lost += 1;
            return;
        }
        inside.records.push_back(record);
        drop(inside);
        self.changed.notify_one();
    }
}

/// Python's number of a level.
fn number(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        _ => 5,
    }
}

/// Keeps what is said from this level on, by Python's numbers, for whoever takes it with `log_take`.
#[pyfunction]
pub(crate) fn log_open(level: u8) -> PyResult<()> {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    let level = match level {
        41.. => return Err(PyValueError::new_err("kvx says nothing above logging.ERROR (40)")),
        31..=40 => Level::ERROR,
        21..=30 => Level::WARN,
        11..=20 => Level::INFO,
        6..=10 => Level::DEBUG,
        _ => Level::TRACE,
    };
    if FORKED.load(Ordering::Relaxed) {
        return Err(error::raise(
            Error::misuse("log", "this process was forked from one that used kvx")
                .with_remedy("start processes with multiprocessing's spawn or forkserver"),
        ));
    }
    subscriber::set_level(level);
    QUEUE.lock().open = true;
    let installed = *INSTALLED
        .get_or_init(|| tracing::subscriber::set_global_default(Forward::default()).is_ok());
    tracing::callsite::rebuild_interest_cache();
    if installed {
        return Ok(());
    }
    Err(error::raise(Error::misuse("log", "something else in this library listens already")))
}

type Shown = (u8, &'static str, String, f64, Option<String>, Option<&'static str>, Option<u32>);

/// What was said and not yet taken, and how much was lost; waits up to `timeout` seconds for something. `None` once it is closed and
/// everything was taken.
#[pyfunction]
pub(crate) fn log_take(py: Python<'_>, timeout: f64) -> PyResult<Option<(Vec<Shown>, u64)>> {
    let timeout = crate::number::seconds("timeout", timeout)?;
    let taken = py.detach(|| {
        let (mut inside, _) = QUEUE
            .changed
            .wait_timeout_while(QUEUE.lock(), timeout, |it| it.open && it.records.is_empty())
            .unwrap_or_else(PoisonError::into_inner);
        let records: Vec<Record> = inside.records.drain(..).collect();
        let lost = std::mem::take(&mut inside.lost);
        (inside.open || !records.is_empty() || lost > 0).then_some((records, lost))
    });
    Ok(taken.map(|(records, lost)| (records.into_iter().map(shown).collect(), lost)))
}

fn shown(record: Record) -> Shown {
    let at = record.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let (file, line) = record.place;
    let level = number(record.level);
    (level, record.target, record.text, at.as_secs_f64(), record.thread, file, line)
}

/// Nothing more is kept.
#[pyfunction]
pub(crate) fn log_close() {
    QUEUE.lock().open = false;
    QUEUE.changed.notify_all();
}

/// Whether this is a child of the process that began to listen: its queue has no reader, and perhaps a lock that nobody opens.
static FORKED: AtomicBool = AtomicBool::new(false);

/// To be called in a child that was forked.
#[pyfunction]
pub(crate) fn log_forked() {
    FORKED.store(true, Ordering::Relaxed);
}

pub(super) fn put(record: Record) {
    if !FORKED.load(Ordering::Relaxed) {
        QUEUE.put(record);
    }
}
