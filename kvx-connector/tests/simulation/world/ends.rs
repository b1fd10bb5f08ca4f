//! What the ranks say, held to the promises.

use kvx_connector::protocol::{Access, LeaseName, Reason, RequestNumber};
use kvx_connector::rank::RankEvent;

use super::{Try, Verdict, World, key};

impl World<'_> {
    pub(super) fn heard(&mut self, producing: bool, rank: usize, event: RankEvent) -> Verdict {
        self.note(|| format!("{} {rank}: {event:?}", if producing { 'p' } else { 'c' }));
        match event {
            RankEvent::Freed { lease, why } if self.owns(producing) => self.freed(rank, lease, why),
            RankEvent::LeaseQuarantined { lease, .. }
                if self.owns(producing) && self.access == Access::Write =>
            {
                self.tally.quarantined += 1;
                if let Some(open) = self.lease.as_mut().filter(|open| open.name == lease) {
                    open.quarantined[rank] = true;
                }
                Ok(())
            }
            RankEvent::Ready { request, .. } => self.ready(rank, request),
            RankEvent::Failed { request, quarantined, error, report, .. } => {
                self.last_error = format!("rank {rank}: {error}; {report:?}");
                self.tally.failed += 1;
                self.ended(rank, request, quarantined)
            }
            RankEvent::Aborted { request, quarantined } => {
                self.tally.aborted += 1;
                self.ended(rank, request, quarantined)
            }
            RankEvent::Unquarantined { request } => {
                if let Some(attempt) = self.attempt.as_mut().filter(|one| one.request == request) {
                    attempt.kept[rank] = false;
                }
                self.close_attempt()
            }
            RankEvent::PartReady { .. } => Ok(()),
            other => Err(format!("unexpected: {other:?}")),
        }
    }

    fn freed(&mut self, rank: usize, name: LeaseName, why: Reason) -> Verdict {
        let Some(lease) = self.lease.as_mut().filter(|lease| lease.name == name) else {
            return Err(format!("rank {rank} frees {name}, which is not open"));
        };
        if std::mem::replace(&mut lease.freed[rank], true) {
            return Err(format!("rank {rank} frees {name} twice"));
        }
        let serials = lease.serials.clone();
        self.ended.insert((name, rank), why);
        if lease.freed.iter().all(|freed| *freed) {
            self.lease = None;
        }
        // This rank's blocks are used again, for something else.
        if self.access == Access::Write {
            if why == Reason::Done {
                self.check_exact(rank, &serials, &format!("{name} is done at rank {rank}"))?;
            }
            return self.scribble_one(rank);
        }
        for region in &self.producer.lives[rank].regions {
            let bytes: Vec<u8> = (0..region.bytes()).map(|at| !key(serials[0], at)).collect();
            region.write_at(0, &bytes).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn mine(&mut self, rank: usize, request: RequestNumber) -> Verdict<&mut Try> {
        let Some(attempt) = self.attempt.as_mut().filter(|one| one.request == request) else {
            return Err(format!("rank {rank} ends request {}, which is not open", request.0));
        };
        if std::mem::replace(&mut attempt.ended[rank], true) {
            return Err(format!("rank {rank} ends request {} twice", request.0));
        }
        Ok(attempt)
    }

    /// To read: everything that this rank needs is there.
    fn ready(&mut self, rank: usize, request: RequestNumber) -> Verdict {
        let attempt = self.mine(rank, request)?;
        attempt.ready += 1;
        let (serial, all) = (attempt.serial, attempt.ready == attempt.ended.len());
        let (name, edited) = (attempt.lease, attempt.edited);
        self.tally.ready += 1;
        // Whoever has to do with no rank of the other side is done at once, whatever the ticket says.
        let moves = match self.access {
            Access::Read => self.needs(rank),
            Access::Write => all && (0..self.consumer.lives.len()).any(|rank| self.needs(rank)),
        };
        if edited && moves {
            return Err(format!(
                "request {} is ready at rank {rank} by an edited ticket",
                request.0
            ));
        }
        if self.access == Access::Read {
            let what = format!("request {} is ready at rank {rank}", request.0);
            self.check_exact(rank, &[serial], &what)?;
        } else if all {
            self.check_done(request, name)?;
        }
        self.close_attempt()
    }

    /// Where all ranks say that a request is written, it was in time at every rank into which something is written.
    fn check_done(&self, request: RequestNumber, name: LeaseName) -> Verdict {
        for rank in 0..self.consumer.lives.len() {
            let why = self.ended.get(&(name, rank));
            if self.needs(rank) && why.is_some_and(|why| *why != Reason::Done) {
                return Err(format!(
                    "request {} is written, and {name} had ended at rank {rank}: {why:?}",
                    request.0
                ));
            }
        }
        Ok(())
    }

    fn ended(&mut self, rank: usize, request: RequestNumber, quarantined: bool) -> Verdict {
        let attempt = self.mine(rank, request)?;
        attempt.kept[rank] = quarantined;
        if quarantined {
            self.tally.quarantined += 1;
        }
        self.close_attempt()
    }

    /// When all ranks have ended and nothing is kept, the blocks are the engine's again.
    fn close_attempt(&mut self) -> Verdict {
        let over = self.attempt.as_ref().is_some_and(|attempt| {
            attempt.ended.iter().all(|ended| *ended) && attempt.kept.iter().all(|kept| !*kept)
        });
        if over {
            self.attempt = None;
            if self.access == Access::Read {
                self.scribble()?;
            }
        }
        Ok(())
    }
}
