//! The thread that computes digests, so that a rank's own thread does not hold up other requests meanwhile. It is there once
//! there is a digest to be computed.

use std::sync::Weak;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use kvx_core::thread::runs_long;

use super::shared::Shared;
use crate::rank::DigestJob;

pub(super) struct Digester {
    worker: Weak<Shared>,
    running: Option<Running>,
}

/// The thread, and what it is given. What waits is bounded by the rank.
pub(super) struct Running {
    jobs: Sender<DigestJob>,
    thread: JoinHandle<()>,
}

impl Digester {
    pub(super) const fn new(worker: Weak<Shared>) -> Self {
        Self { worker, running: None }
    }

    /// Has a digest computed. Gives it back where there is no thread to be had.
    pub(super) fn give(&mut self, job: DigestJob) -> Result<(), DigestJob> {
        if self.running.is_none() {
            let (jobs, waiting) = channel();
            let worker = Weak::clone(&self.worker);
            let thread = std::thread::Builder::new()
                .name("kvx-digest".into())
                .spawn(move || run(&worker, &waiting));
            match thread {
                Ok(thread) => self.running = Some(Running { jobs, thread }),
                Err(error) => tracing::warn!(%error, "no thread for digests"),
            }
        }
        match &self.running {
            Some(running) => running.jobs.send(job).map_err(|unsent| unsent.0),
            None => Err(job),
        }
    }

    pub(super) const fn take(&mut self) -> Option<Running> {
        self.running.take()
    }
}

impl Running {
    /// Ends the thread, once it has computed what it was given.
    pub(super) fn end(self) {
        drop(self.jobs);
        if self.thread.join().is_err() {
            tracing::error!("the thread that computes digests has panicked");
        }
    }
}

fn run(worker: &Weak<Shared>, jobs: &Receiver<DigestJob>) {
    runs_long();
    while let Ok(job) = jobs.recv() {
        let result = job.run();
        let Some(shared) = worker.upgrade() else { return };
        shared.act(|inside| inside.rank.digested(job.number(), result));
    }
}
