//! Serving this engine's cards to whoever asks.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvx_core::card::{CardReader, EngineName};
use kvx_core::{Error, ErrorKind, Result, Retry};

use super::io::Place;

/// Encoded cards of one engine, by replica and rank.
#[derive(Clone, Debug, Default)]
pub struct OwnCards {
    replicas: BTreeMap<u32, Replica>,
}

#[derive(Clone, Debug)]
struct Replica {
    ranks: usize,
    cards: BTreeMap<u32, Arc<[u8]>>,
}

impl OwnCards {
    /// The cards of `engine`. Those of a replica are served once all of its ranks' are there.
    ///
    /// # Errors
    ///
    /// Those of [`CardReader::peek`], and [`ErrorKind::Config`]: a card of another engine, or two of one rank.
    pub fn new(engine: &EngineName, cards: Vec<Arc<[u8]>>) -> Result<Self> {
        let mut replicas = BTreeMap::new();
        for card in cards {
            let head = CardReader::default().peek(&card)?;
            let identity = head.identity();
            identity
                .expect_engine(engine.as_str(), head.control())
                .map_err(|error| error.with_kind(ErrorKind::Config))?;
            let (place, grid) = (Place::from(&identity.coords), identity.coords.grid);
            let new = || Replica { ranks: (grid.tp * grid.pp) as usize, cards: BTreeMap::new() };
            let replica = replicas.entry(place.replica).or_insert_with(new);
            if replica.cards.insert(place.rank, card).is_some() {
                return Err(Error::config("peers.serve", "two cards of one rank")
                    .with_context("rank", place));
            }
        }
        Ok(Self { replicas })
    }
    /// The cards of a replica, in the order of its ranks.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Resources`]: not all of them are there, yet.
    pub fn replica(&self, replica: u32) -> Result<Vec<Arc<[u8]>>> {
        let later = |what: &'static str| {
            Error::new(ErrorKind::Resources, "peers.serve", what)
                .with_context("replica", replica)
                .with_retry(Retry::Backoff)
        };
        let Some(found) = self.replicas.get(&replica) else {
            return Err(later("there are no cards of this replica"));
        };
        if found.cards.len() != found.ranks {
            return Err(later("not all ranks of this replica have published their cards"));
        }
        Ok(found.cards.values().map(Arc::clone).collect())
    }
}
