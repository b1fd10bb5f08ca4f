//! One step's transfers: posts them, waits until they have settled, and until everybody knows.

use std::time::{Duration, Instant};

use kvx_core::id::PeerId;
use kvx_core::plan::{BlockTable, Request, SegmentList};
use kvx_core::port::Transfer;
use kvx_core::transfer::{Mode, Segment};
use kvx_core::{Error, ErrorKind, Result};

use super::replay::{Damaged, Job, Replay, Through};
use crate::args::Damage;
use crate::engine::Engine;
use crate::engine::pool::Lease;
use crate::engine::rank::{Rank, note};
use crate::engine::ranks::Awaited;
use crate::engine::work::Sample;
use crate::pairs::PairPlan;

/// Longest time for the transfers of one step, notifications included.
const PATIENCE: Duration = Duration::from_secs(120);

impl Replay {
    /// Moves the caches, and waits until all is settled and everybody knows.
    pub(super) fn transfer(&mut self, jobs: &[Job], damaged: Option<&Damaged>) -> Result<()> {
        if self.options.through == Through::Connector {
            return self.transfer_leased(jobs);
        }
        let begun = Instant::now();
        let mut pending = Vec::new();
        let mut list = SegmentList::new();
        for job in jobs {
            self.post(job, damaged, &mut list, &mut pending)?;
        }
        let mut missing: Vec<Awaited> = jobs.iter().flat_map(|job| self.awaited(job)).collect();
        self.target().place.expect(&missing)?;
        while !pending.is_empty() {
            self.settle(&mut pending)?;
            self.target().place.look()?;
            in_time(begun, "a transfer did not settle")?;
        }
        while !missing.is_empty() {
            self.totals.notifications += self.target().place.hear(&mut missing)?;
            in_time(begun, "a notification did not arrive")?;
        }
        Ok(())
    }

    /// The engine that is told.
    fn target(&mut self) -> &mut Engine {
        match self.options.mode {
            Mode::Read => &mut self.producers,
            Mode::Write => &mut self.consumers,
        }
    }

    /// Posts the transfers of one request.
    fn post(
        &self,
        job: &Job,
        damaged: Option<&Damaged>,
        list: &mut SegmentList,
        pending: &mut Vec<Transfer>,
    ) -> Result<()> {
        let mode = self.options.mode;
        let link = &self.links[job.consumer];
        let (from, to) = (tables(&job.source), tables(&job.target));
        let tokens = job.prompt.tokens();
        let request = Request::whole(tokens, &from, &to).with_range(job.target.reused..tokens);
        for pair in &link.pairs {
            let (producer, consumer) = (pair.pair.producer, pair.pair.consumer);
            let (me, peer) = self.initiator(job, producer, consumer)?;
            pair.plan.segments(&request, mode, &me.port.capabilities().limits, list)?;
            let wrong = damaged.filter(|(rank, replica, _)| {
                (*rank, *replica) == (consumer, job.consumer)
                    && self.options.damage == Some(Damage::Segment)
            });
            let segments = match wrong {
                Some((_, _, sample)) => misplace(list.as_slice(), mode, sample),
                None => None,
            };
            let segments = segments.as_deref().unwrap_or(list.as_slice());
            let text = note(job.number);
            pending.push(me.port.transfer(peer, mode, &me.set, segments, Some(&text))?);
        }
        if mode == Mode::Write {
            return Ok(());
        }
        // Producer ranks that nobody reads from are told, too.
        for (producer, roster) in link.rosters.iter().enumerate() {
            for consumer in roster {
                let paired = |pair: &PairPlan| {
                    (pair.pair.producer, pair.pair.consumer) == (producer, *consumer)
                };
                if !link.pairs.iter().any(paired) {
                    let (me, peer) = self.initiator(job, producer, *consumer)?;
                    let text = note(job.number);
                    pending.push(me.port.transfer(peer, mode, &me.set, &[], Some(&text))?);
                }
            }
        }
        Ok(())
    }

    /// Who starts transfers between two ranks of a job's replicas, and its name for the other.
    fn initiator(&self, job: &Job, producer: usize, consumer: usize) -> Result<(&Rank, PeerId)> {
        let from = self.producers.first(job.producer) + producer;
        let to = self.consumers.first(job.consumer) + consumer;
        let (me, other) = match self.options.mode {
            Mode::Read => (&self.consumers.place.list()?[to], from),
            Mode::Write => (&self.producers.place.list()?[from], to),
        };
        Ok((me, me.peer(other)?))
    }

    /// Counts the transfers that have settled, and takes them out.
    fn settle(&mut self, pending: &mut Vec<Transfer>) -> Result<()> {
        let mut failed = None;
        pending.retain_mut(|transfer| match transfer.try_result() {
            None => true,
            Some(Ok(report)) => {
                self.totals.bytes += report.bytes;
                self.totals.segments += report.segments;
                if self.totals.transport.is_empty() {
                    self.totals.transport.push_str(&report.transport);
                }
                false
            }
            Some(Err(error)) => {
                failed.get_or_insert(error);
                false
            }
        });
        match failed {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Who must be told about a job, by whom.
    fn awaited(&self, job: &Job) -> Vec<Awaited> {
        let link = &self.links[job.consumer];
        let (from, to) = (self.producers.first(job.producer), self.consumers.first(job.consumer));
        let request = job.number;
        match self.options.mode {
            Mode::Read => {
                let rosters = link.rosters.iter().enumerate();
                rosters
                    .flat_map(|(rank, roster)| roster.iter().map(move |other| (rank, *other)))
                    .map(|(rank, other)| Awaited { rank: from + rank, from: to + other, request })
                    .collect()
            }
            Mode::Write => {
                let pairs = link.pairs.iter().map(|pair| (pair.pair.consumer, pair.pair.producer));
                pairs
                    .map(|(rank, other)| Awaited { rank: to + rank, from: from + other, request })
                    .collect()
            }
        }
    }
}

fn tables(lease: &Lease) -> Vec<BlockTable<'_>> {
    lease.tables.iter().map(|ids| BlockTable::new(ids)).collect()
}

pub(super) fn in_time(begun: Instant, what: &'static str) -> Result<()> {
    if begun.elapsed() < PATIENCE {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Fabric, "demo", what).with_context("seconds", PATIENCE.as_secs()))
}

/// The segments, the one that brings `sample` taken from one element before.
fn misplace(segments: &[Segment], mode: Mode, sample: &Sample) -> Option<Vec<Segment>> {
    let index = segments.iter().position(|segment| {
        let (region, offset) = match mode {
            Mode::Read => (segment.local_region, segment.local_offset),
            Mode::Write => (segment.remote_region, segment.remote_offset),
        };
        region == sample.region && (offset..offset + segment.bytes).contains(&sample.offset)
    })?;
    let mut segments = segments.to_vec();
    let segment = &mut segments[index];
    let source = match mode {
        Mode::Read => &mut segment.remote_offset,
        Mode::Write => &mut segment.local_offset,
    };
    *source = source.saturating_sub(sample.element);
    Some(segments)
}
