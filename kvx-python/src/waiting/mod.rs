//! What is under way, waited for from Python: by threads that sleep, and by event loops that are rung.
//!
//! Whoever ends something is a thread of kvx, and never touches Python: it stores the outcome, wakes threads, and writes to the
//! [`Bell`] of each event loop that waits, which the loop reads as it reads any descriptor.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

mod alarm;
mod bell;

pub(crate) use alarm::run;
pub(crate) use bell::{Bell, PyBell};

/// How long a thread sleeps before it looks whether Python has a signal for it.
const LOOK: Duration = Duration::from_millis(50);

/// Something under way that ends with a `T`.
pub(crate) struct Waiting<T> {
    inside: Mutex<Inside<T>>,
    changed: Condvar,
}

type Running<T> = Pin<Box<dyn Future<Output = T> + Send>>;

struct Inside<T> {
    /// `None` while it is polled, and once it is over.
    running: Option<Running<T>>,
    /// Woken while it was polled.
    again: bool,
    outcome: Option<Arc<T>>,
    /// Who wants to be told, and by what number they know it.
    bells: Vec<(Arc<Bell>, u64)>,
}

impl<T: Send + Sync + 'static> Waiting<T> {
    /// Follows `running` from now on. It is polled by whoever wakes it, a thread of kvx's own: so it must do nothing but wait for
    /// messages. What joins threads is for [`run`].
    pub(crate) fn new(running: impl Future<Output = T> + Send + 'static) -> Arc<Self> {
        let waiting = Arc::new(Self {
            inside: Mutex::new(Inside {
                running: Some(Box::pin(running)),
                again: false,
                outcome: None,
                bells: Vec::new(),
            }),
            changed: Condvar::new(),
        });
        waiting.advance();
        waiting
    }

    fn lock(&self) -> MutexGuard<'_, Inside<T>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How it ended, if it has.
    pub(crate) fn outcome(&self) -> Option<Arc<T>> {
        self.lock().outcome.clone()
    }

    /// Has `bell` rung with `number` when it is over: at once, where it is.
    pub(crate) fn tell(&self, bell: &Arc<Bell>, number: u64) {
        let mut inside = self.lock();
        if inside.outcome.is_none() {
            inside.bells.push((Arc::clone(bell), number));
            return;
        }
        drop(inside);
        bell.ring(number);
    }

    /// Waits until it is over, for at most `timeout`. Signals of Python are heard.
    ///
    /// # Errors
    ///
    /// What a signal's handler has raised.
    pub(crate) fn wait(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
    ) -> PyResult<Option<Arc<T>>> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = until.map_or(LOOK, |until| until.saturating_duration_since(Instant::now()));
            let outcome = py.detach(|| self.sleep(left.min(LOOK)));
            if outcome.is_some() || left.is_zero() {
                return Ok(outcome);
            }
            py.check_signals()?;
        }
    }

    fn sleep(&self, time: Duration) -> Option<Arc<T>> {
        let (inside, _) = self
            .changed
            .wait_timeout_while(self.lock(), time, |inside| inside.outcome.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        inside.outcome.clone()
    }

    /// Polls it, unless another thread does.
    fn advance(self: &Arc<Self>) {
        let waker = Waker::from(Arc::clone(self));
        let mut inside = self.lock();
        let Some(mut running) = inside.running.take() else {
            inside.again = true;
            return;
        };
        loop {
            inside.again = false;
            drop(inside);
            // No lock is held: what is polled may wake, and ask for what another thread holds.
            let polled = running.as_mut().poll(&mut Context::from_waker(&waker));
            inside = self.lock();
            match polled {
                Poll::Ready(outcome) => {
                    inside.outcome = Some(Arc::new(outcome));
                    let bells = std::mem::take(&mut inside.bells);
                    drop(inside);
                    self.changed.notify_all();
                    bells.iter().for_each(|(bell, number)| bell.ring(*number));
                    return;
                }
                Poll::Pending if inside.again => {}
                Poll::Pending => {
                    inside.running = Some(running);
                    return;
                }
            }
        }
    }
}

impl<T: Send + Sync + 'static> Wake for Waiting<T> {
    fn wake(self: Arc<Self>) {
        self.advance();
    }
}
