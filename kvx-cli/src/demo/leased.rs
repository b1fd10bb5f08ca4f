//! One step's requests, moved through the whole connector: leased by the one engine, fetched (or written) by the other, confirmed,
//! and their leases over.

use std::pin::pin;
use std::time::{Duration, Instant};

use kvx_connector::engine::Fetch;
use kvx_connector::rank::FetchReport;
use kvx_connector::worker::FetchFailure;
use kvx_core::Result;
use kvx_core::transfer::Mode;

use super::moving::in_time;
use super::replay::{Job, Replay};
use crate::engine::place::Place;
use crate::engine::pool::Lease;
use crate::remote::Publish;

/// How often it looks after the other process while requests move.
const LOOK: Duration = Duration::from_millis(100);

impl Replay {
    /// Moves the caches, and waits until every rank of the engine that leased them knows that they have been moved.
    pub(super) fn transfer_leased(&mut self, jobs: &[Job]) -> Result<()> {
        let mode = self.options.mode;
        let mut fetches = Vec::new();
        for job in jobs {
            let (owner, user) = sides(mode, job);
            let publish = Publish {
                replica: owner.0,
                request: job.number,
                tokens: job.prompt.tokens(),
                tables: owner.1.tables.clone(),
                mode,
            };
            let ticket = self.owner().publish(publish)?;
            let range = job.target.reused..job.prompt.tokens();
            let place = match mode {
                Mode::Read => &self.consumers.place,
                Mode::Write => &self.producers.place,
            };
            fetches.push(place.fetch(user.0, &ticket, range, &user.1.tables, mode)?);
        }
        let requests: Vec<u64> = jobs.iter().map(|job| job.number).collect();
        self.owner().expect_over(&requests)?;
        for report in self.fetched(fetches)? {
            self.totals.bytes += report.bytes;
            self.totals.segments += report.segments;
            // Backend, transport, route.
            let transport = report.transports.iter().find_map(|text| text.split('/').nth(1));
            if let Some(transport) = transport
                && self.totals.transport.is_empty()
            {
                self.totals.transport.push_str(transport);
            }
        }
        let runtime = &self.runtime;
        let owner = match mode {
            Mode::Read => &mut self.producers.place,
            Mode::Write => &mut self.consumers.place,
        };
        self.totals.notifications += owner.over(runtime, &requests)?;
        Ok(())
    }

    /// The engine that leases.
    const fn owner(&mut self) -> &mut Place {
        match self.options.mode {
            Mode::Read => &mut self.producers.place,
            Mode::Write => &mut self.consumers.place,
        }
    }

    /// Waits for all of them, and looks after the other process meanwhile.
    fn fetched(&mut self, fetches: Vec<Fetch>) -> Result<Vec<FetchReport>> {
        let begun = Instant::now();
        let mut all = pin!(async {
            let mut reports = Vec::new();
            for fetch in fetches {
                reports.extend(fetch.over().await?);
            }
            Ok::<_, FetchFailure>(reports)
        });
        loop {
            let bounded = async { tokio::time::timeout(LOOK, all.as_mut()).await };
            match self.runtime.block_on(bounded) {
                Ok(Ok(reports)) => return Ok(reports),
                Ok(Err(failed)) => {
                    // Most often because the other process has ended, which says more.
                    self.owner().look()?;
                    return Err(failed.error.again());
                }
                Err(_) => {
                    self.owner().look()?;
                    in_time(begun, "a request was not moved")?;
                }
            }
        }
    }
}

/// Who leases and who uses the lease, each with its replica and blocks.
const fn sides(mode: Mode, job: &Job) -> ((usize, &Lease), (usize, &Lease)) {
    let (producer, consumer) = ((job.producer, &job.source), (job.consumer, &job.target));
    match mode {
        Mode::Read => (producer, consumer),
        Mode::Write => (consumer, producer),
    }
}
