//! Waiting for what must be polled by whoever waits: opening and closing, which join threads.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use super::LOOK;

/// Wakes the thread that waits.
#[derive(Default)]
struct Alarm {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }
}

impl Alarm {
    /// Sleeps until it has rung, for at most `time`.
    fn sleep(&self, time: Duration) {
        let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut rung, _) = self
            .changed
            .wait_timeout_while(rung, time, |rung| !*rung)
            .unwrap_or_else(PoisonError::into_inner);
        *rung = false;
    }
}

/// Waits for `running`, for at most `timeout`, without Python's lock. Signals of Python are heard.
///
/// # Errors
///
/// What a signal's handler has raised; `running` is dropped.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    running: impl Future<Output = T> + Send,
    timeout: Option<Duration>,
) -> PyResult<Option<T>> {
    let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let alarm = Arc::new(Alarm::default());
    let waker = Waker::from(Arc::clone(&alarm));
    let mut running: Pin<Box<dyn Future<Output = T> + Send + '_>> = Box::pin(running);
    loop {
        let left = until.map_or(LOOK, |until| until.saturating_duration_since(Instant::now()));
        let polled = py.detach(|| {
            let polled = running.as_mut().poll(&mut Context::from_waker(&waker));
            if polled.is_pending() {
                alarm.sleep(left.min(LOOK));
            }
            polled
        });
        match polled {
            Poll::Ready(outcome) => return Ok(Some(outcome)),
            Poll::Pending if left.is_zero() => return Ok(None),
            Poll::Pending => py.check_signals()?,
        }
    }
}
