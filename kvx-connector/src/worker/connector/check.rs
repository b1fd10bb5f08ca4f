//! Whether a step can be carried out: before any of it is.

use std::collections::BTreeSet;

use kvx_core::{Error, Result};

use super::book::Book;
use super::loads::Stage;
use crate::scheduler::StepMetadata;

const OPERATION: &str = "worker.start_load";

fn misuse(what: &'static str) -> Error {
    Error::misuse(OPERATION, what)
}

impl Book {
    /// Whether all of a step can be carried out. Nothing of it is, where not.
    pub(super) fn check(&self, step: &StepMetadata) -> Result<()> {
        if step.engine != self.life {
            return Err(misuse("a step of another life of the engine")
                .with_context("step_engine", step.engine)
                .with_context("worker_engine", self.life)
                .with_remedy("start workers anew with the engine's scheduler"));
        }
        let next = self.steps + 1;
        if step.step != next {
            let what = match step.step < next {
                true => "a step that was carried out already",
                false => "steps have been left out",
            };
            return Err(misuse(what)
                .with_context("step", step.step)
                .with_context("expected", next)
                .with_remedy("give each worker every step, once, in the order of their numbers"));
        }
        if !step.saves.is_empty() && !self.host {
            return Err(misuse("blocks are to be copied, and there is no copy function")
                .with_remedy("set the copy function, or host_buffer = false at the scheduler"));
        }
        let uses = !(step.holds.is_empty() && step.loads.is_empty() && step.releases.is_empty());
        if uses && !self.served {
            return Err(misuse("another engine is to be asked before this one's ranks are known")
                .with_remedy("give serve_cards the cards of all ranks first"));
        }
        self.check_leases(step)?;
        self.check_loads(step)
    }

    fn check_leases(&self, step: &StepMetadata) -> Result<()> {
        let mut named = BTreeSet::new();
        let expects = step.expects.iter().map(|it| it.lease);
        for lease in expects.chain(step.grants.iter().map(|it| it.lease)) {
            if lease.owner != self.life {
                return Err(
                    misuse("a lease of another life of the engine").with_context("lease", lease)
                );
            }
        }
        for grant in &step.grants {
            let known = self.leases.get(&grant.lease).is_some_and(|lease| lease.granted);
            if known || !named.insert(grant.lease) {
                return Err(misuse("a lease that is granted already")
                    .with_context("lease", grant.lease)
                    .with_context("request", &grant.request));
            }
        }
        let tables = step.grants.iter().map(|it| it.tables.len());
        let mut tables = tables.chain(step.saves.iter().map(|it| it.tables.len()));
        match tables.find(|count| *count != self.groups.len()) {
            None => Ok(()),
            Some(count) => Err(misuse("there must be a block table for each cache group")
                .with_context("tables", count)
                .with_context("groups", self.groups.len())),
        }
    }

    fn check_loads(&self, step: &StepMetadata) -> Result<()> {
        let mut named = BTreeSet::new();
        let refuse = |what, attempt| Err(misuse(what).with_context("attempt", attempt));
        for hold in &step.holds {
            if self.attempts.contains_key(&hold.attempt) || !named.insert(hold.attempt) {
                return refuse("an attempt that is held already", hold.attempt);
            }
        }
        named.clear();
        for load in &step.loads {
            let known = self.attempts.get(&load.attempt);
            let begun = known.is_some_and(|known| !matches!(known.stage, Stage::Held));
            if begun || !named.insert(load.attempt) {
                return refuse("an attempt that has begun already", load.attempt);
            }
            if load.local.len() != self.groups.len() {
                return Err(misuse("there must be a block table for each cache group")
                    .with_context("attempt", load.attempt)
                    .with_context("tables", load.local.len())
                    .with_context("groups", self.groups.len()));
            }
        }
        Ok(())
    }
}
