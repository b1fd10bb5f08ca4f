//! Whom one rank reads from or writes to, how, and whom it tells.

use std::fmt;
use std::sync::Arc;

use kvx_core::Result;
use kvx_core::card::{Card, EngineName};
use kvx_core::id::Incarnation;
use kvx_core::layout::RankLayout;
use kvx_core::plan::{Pairing, PeerPlan};
use serde::Serialize;

use super::io::Connection;

/// What this engine is in a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// It reads what the other engine has filled.
    Consumer,
    /// It writes into the other engine's memory what it has filled.
    Producer,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Consumer => "consumer",
            Self::Producer => "producer",
        })
    }
}

/// What one rank of this engine has to do with one life of another engine's replica. Good until one of its ranks is
/// [`Gone`](super::Output::Gone).
#[derive(Clone, Debug)]
pub struct Route {
    /// The other engine.
    pub engine: EngineName,
    /// Its replica.
    pub replica: u32,
    /// Its life.
    pub life: Incarnation,
    /// What this engine is.
    pub role: Role,
    /// How many ranks the other engine's replica has.
    pub ranks: usize,
    /// The ranks between which and this rank bytes move. Those that the consumer reads from, or that the producer writes to.
    pub links: Vec<Link>,
    /// The ranks that must hear from this one when it is done, though some of them gave it nothing.
    pub confirms: Vec<Confirm>,
}

/// A rank with which bytes are exchanged.
#[derive(Clone, Debug)]
pub struct Link {
    /// Its number in the replica.
    pub rank: usize,
    /// Its life.
    pub incarnation: Incarnation,
    /// The connection to it.
    pub connection: Connection,
    /// Its card.
    pub card: Arc<Card>,
    /// How the two layouts map.
    pub plan: Arc<PeerPlan>,
}

/// A rank that must hear from this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confirm {
    /// Its number in the replica.
    pub rank: usize,
    /// Its life.
    pub incarnation: Incarnation,
    /// The ranks of this engine that it will hear from, this one among them: what to make its
    /// [`Roster`](kvx_core::plan::Roster) of.
    pub hears: Vec<usize>,
}
/// What does not change as long as the other engine's cards do not.
#[derive(Debug)]
pub(super) struct Course {
    /// Rank and plan.
    pub(super) links: Vec<(usize, Arc<PeerPlan>)>,
    /// Rank, and whom it hears.
    pub(super) confirms: Vec<(usize, Vec<usize>)>,
}

impl Course {
    /// For rank `own` of `ours`, and the engine with these cards.
    pub(super) fn new(
        role: Role,
        ours: &[RankLayout],
        own: usize,
        rotation: u32,
        cards: &[Arc<Card>],
    ) -> Result<Self> {
        let theirs: Vec<RankLayout> = cards.iter().map(|card| card.layout().clone()).collect();
        match role {
            Role::Consumer => {
                let pairing = Pairing::new(&theirs, ours, rotation)?;
                let mine = pairing.pairs().iter().filter(|pair| pair.consumer == own);
                let links = mine.map(|pair| {
                    let plan = PeerPlan::compile(&theirs[pair.producer], &ours[own], pair)
                        .map_err(|error| error.with_context("producer_rank", pair.producer))?;
                    Ok((pair.producer, Arc::new(plan)))
                });
                let confirms = pairing
                    .confirms_to(own)
                    .map(|rank| (rank, pairing.roster_of(rank).missing().collect()));
                Ok(Self { links: links.collect::<Result<_>>()?, confirms: confirms.collect() })
            }
            Role::Producer => {
                let rotation = cards.first().map_or(0, |card| card.identity().coords.dp);
                let pairing = Pairing::new(ours, &theirs, rotation)?;
                let mine = pairing.pairs().iter().filter(|pair| pair.producer == own);
                let links = mine.map(|pair| {
                    let plan = PeerPlan::compile(&ours[own], &theirs[pair.consumer], pair)
                        .map_err(|error| error.with_context("consumer_rank", pair.consumer))?;
                    Ok((pair.consumer, Arc::new(plan)))
                });
                // Who owns the memory hears from all who write into it.
                let confirms =
                    pairing.readers_of(own).map(|rank| (rank, pairing.sources_of(rank).collect()));
                Ok(Self { links: links.collect::<Result<_>>()?, confirms: confirms.collect() })
            }
        }
    }

    /// Memory of it, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        let plans = self.links.iter().map(|(_, plan)| plan.memory_bytes() + 32);
        let confirms = self.confirms.iter().map(|(_, hears)| 32 + size_of_val(&**hears));
        plans.sum::<usize>() + confirms.sum::<usize>()
    }
}
