//! What a worker was told in steps, and how far it is: the leases that it grants, and what its rank's events mean for them and
//! for loads. No thread, no clock, no lock.
//!
//! Of a lease:
//!
//! ```text
//!   expect ──▶ expected ── saves: copied into the host's buffer ──▶ grant ──▶ granted ── Freed ──▶ reported
//!                  └── withdrawn: never granted, nothing is reported       (published once all copies are over)
//! ```
//!
//! Of loads, see [`loads`](super::loads).

use std::collections::BTreeMap;
use std::time::Duration;

use kvx_core::Result;
use kvx_core::id::Incarnation;
use kvx_core::layout::CacheGroup;

use super::copies::{Copies, CopyJob, CopyNumber, CopyOf, Direction};
use super::loads::Attempt;
use super::outbox::{Outbox, Recent};
use crate::protocol::{Access, LeaseName, Part, RequestNumber, StageNumber};
use crate::rank::{Channel, GrantOrder, Kept, Rank, RankEvent, StageOf};
use crate::scheduler::{Grant, LeaseEnd, Save, StepMetadata, Withdrawal, WorkerReport};

/// See the [module](self).
#[derive(Debug)]
pub(in crate::worker) struct Book {
    /// The life of the engine.
    pub(super) life: Incarnation,
    pub(super) groups: Vec<CacheGroup>,
    /// Whether caches go through a buffer of the host.
    pub(super) host: bool,
    pub(super) digests: bool,
    /// Whether the engine's ranks are known.
    pub(super) served: bool,
    /// Number of the last step.
    pub(super) steps: u64,
    pub(super) leases: BTreeMap<LeaseName, Lease>,
    pub(super) attempts: BTreeMap<u64, Attempt>,
    /// Whose each request of the rank is.
    pub(super) requests: BTreeMap<RequestNumber, u64>,
    /// Requests that ended quarantined: their attempts, and how many blocks.
    pub(super) unquiet: BTreeMap<RequestNumber, (u64, u64)>,
    pub(super) next_request: u64,
    pub(super) recent: Recent,
    pub(super) copies: Copies,
    pub(super) out: Outbox,
}

/// A lease that is expected or granted.
#[derive(Debug, Default)]
pub(super) struct Lease {
    pub(super) granted: bool,
    /// How many copies were ordered, and how many of them are not over.
    ordered: u32,
    copying: u32,
    /// Whether a copy failed, or one is missing.
    broken: bool,
    /// The stage that waits for the copies.
    stage: Option<StageNumber>,
}

impl Book {
    pub(super) fn new(
        life: Incarnation,
        groups: Vec<CacheGroup>,
        host: bool,
        digests: bool,
    ) -> Self {
        Self {
            life,
            groups,
            host,
            digests,
            served: false,
            steps: 0,
            leases: BTreeMap::new(),
            attempts: BTreeMap::new(),
            requests: BTreeMap::new(),
            unquiet: BTreeMap::new(),
            next_request: 1,
            recent: Recent::default(),
            copies: Copies::default(),
            out: Outbox::default(),
        }
    }

    /// Carries a step out, in the order of its fields.
    ///
    /// # Errors
    ///
    /// What cannot be carried out of it. Nothing of it is, then.
    pub(super) fn take<C: Channel>(
        &mut self,
        now: Duration,
        step: StepMetadata,
        rank: &mut Rank<C>,
    ) -> Result<()> {
        self.check(&step)?;
        self.steps = step.step;
        for expect in step.expects {
            rank.expect(expect.lease, expect.key);
            self.leases.entry(expect.lease).or_default();
        }
        step.saves.into_iter().for_each(|save| self.save(save));
        step.grants.into_iter().for_each(|grant| self.grant(grant, rank));
        for Withdrawal { lease, why } in step.withdrawals {
            rank.withdraw(lease, why);
            if self.leases.get(&lease).is_some_and(|known| !known.granted) {
                self.leases.remove(&lease);
            }
        }
        step.aborts.into_iter().for_each(|attempt| self.abort(attempt, now, rank));
        step.holds.into_iter().for_each(|hold| self.hold(hold, now, rank));
        step.loads.into_iter().for_each(|load| self.load(load, now, rank));
        step.releases.into_iter().for_each(|release| self.release(release, now, rank));
        Ok(())
    }

    fn save(&mut self, save: Save) {
        let lease = self.leases.entry(save.lease).or_default();
        lease.broken |= save.part != lease.ordered;
        lease.ordered += 1;
        lease.copying += 1;
        let of = CopyOf::Lease(save.lease);
        self.copies.add(Direction::ToHost, of, save.tokens, save.tables);
    }

    fn grant<C: Channel>(&mut self, grant: Grant, rank: &mut Rank<C>) {
        let lease = self.leases.entry(grant.lease).or_default();
        lease.granted = true;
        // Readers are told of one part of all tokens: there is nothing to be gained by more once everything is computed.
        let part = Part { number: 0, group: None, layers: 0..u32::MAX, tokens: 0..grant.tokens };
        let (parts, total) = match grant.tokens {
            0 => (Vec::new(), 0),
            _ => (vec![part], 1),
        };
        if self.host && lease.ordered != grant.parts {
            tracing::error!(
                request = %grant.request, ordered = lease.ordered, parts = grant.parts,
                "not everything of a request was copied"
            );
            lease.broken = true;
        }
        rank.grant(GrantOrder {
            lease: grant.lease,
            key: grant.key,
            access: Access::Read,
            tables: grant.tables,
            fingerprint: Some(grant.fingerprint),
            ttl: grant.ttl,
            hard: grant.hard,
            parts,
            total: Some(total),
            stages: u8::from(self.host),
            kept: Kept::default(),
        });
    }

    /// The next copy that is to be begun.
    pub(super) fn next_copy(&mut self, direction: Direction) -> Option<CopyJob> {
        self.copies.take(direction)
    }

    /// A copy is over.
    pub(super) fn copied<C: Channel>(
        &mut self,
        number: CopyNumber,
        result: Result<()>,
        rank: &mut Rank<C>,
    ) {
        match self.copies.done(number) {
            Some(CopyOf::Lease(name)) => {
                let Some(lease) = self.leases.get_mut(&name) else { return };
                lease.copying -= 1;
                if let Err(error) = result {
                    tracing::error!(lease = %name, %error, "blocks could not be copied to the host");
                    lease.broken = true;
                }
                lease.answer(name, rank);
            }
            Some(CopyOf::Load(attempt)) => self.load_copied(attempt, result),
            None => tracing::error!(number = number.0, "the end of a copy that is not under way"),
        }
    }

    /// Something happened to the rank. Gives back what is nobody's here.
    pub(in crate::worker) fn hear<C: Channel>(
        &mut self,
        event: RankEvent,
        now: Duration,
        rank: &mut Rank<C>,
    ) -> Option<RankEvent> {
        match event {
            RankEvent::Freed { lease, why } => {
                if self.leases.remove(&lease).is_some() {
                    self.out.lease(LeaseEnd { lease, why });
                }
            }
            RankEvent::Stage { stage, of: StageOf::Lease(name), .. } => {
                let Some(lease) = self.leases.get_mut(&name) else { return Some(event) };
                lease.stage = Some(stage);
                lease.answer(name, rank);
            }
            RankEvent::Ready { .. }
            | RankEvent::Failed { .. }
            | RankEvent::Aborted { .. }
            | RankEvent::Unquarantined { .. } => self.load_event(event, now, rank),
            RankEvent::LeaseQuarantined { lease, why } => {
                // Its end is reported once it is known that nothing moves.
                tracing::warn!(%lease, %why, "a lease is over, and its blocks are in quarantine");
            }
            other => return Some(other),
        }
        None
    }

    /// Whether there is something to report, or to be copied before it can be.
    pub(in crate::worker) fn has_news(&self) -> bool {
        !self.out.is_empty() || self.copies.loads_wait()
    }

    pub(super) fn report(&mut self) -> WorkerReport {
        self.out.report(self.life)
    }
}

impl Lease {
    /// Says that the copies are over, once they are and somebody waits for it.
    fn answer<C: Channel>(&mut self, name: LeaseName, rank: &mut Rank<C>) {
        if self.copying == 0
            && let Some(stage) = self.stage.take()
        {
            rank.stage_done(StageOf::Lease(name), stage, !self.broken);
        }
    }
}
