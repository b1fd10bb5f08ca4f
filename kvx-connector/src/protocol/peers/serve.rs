//! Serving this engine's cards to whoever asks.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvx_core::card::{CardReader, EngineName};
use kvx_core::id::Incarnation;
use kvx_core::{Error, ErrorKind, Result, Retry};

use super::Peers;
use super::io::{Place, SessionId};
use super::message::{Message, Refusal};

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

/// What is asked for.
pub(super) struct Question {
    pub(super) number: u64,
    pub(super) engine: String,
    pub(super) replica: u32,
    pub(super) version: Option<(Incarnation, u64)>,
    pub(super) offset: u64,
}

impl Peers {
    /// Serves these from now on, and tells those who have others.
    pub(super) fn serve(&mut self, cards: OwnCards) {
        self.own_cards = cards;
        self.own_version += 1;
        let told: Vec<SessionId> = self
            .sessions
            .iter_mut()
            .filter_map(|(id, session)| std::mem::take(&mut session.fetched).then_some(*id))
            .collect();
        told.into_iter().for_each(|session| self.send(session, &Message::Changed));
    }

    pub(super) fn answer_question(&mut self, session: SessionId, question: Question) {
        let Question { number, engine, replica, version, offset } = question;
        let cards = self.look_up(&engine, replica);
        let (lengths, mut offset, cards) = match cards {
            Ok(cards) => {
                let lengths =
                    cards.iter().map(|card| u32::try_from(card.len()).unwrap_or(u32::MAX));
                (lengths.collect(), offset, cards)
            }
            Err((error, later)) => {
                self.stats.refused += 1;
                let refusal = Refusal::new(&error, later);
                return self.send(session, &Message::Refused { number, refusal });
            }
        };
        let own = (self.local.life, self.own_version);
        if version != Some(own) {
            offset = 0;
        }
        let bytes =
            if version == Some(own) && offset == 0 { Vec::new() } else { part(&cards, offset) };
        let (life, version) = own;
        if let Some(session) = self.sessions.get_mut(&session) {
            session.fetched = true;
        }
        self.send(session, &Message::Cards { number, life, version, lengths, offset, bytes });
    }

    fn look_up(&self, engine: &str, replica: u32) -> Result<Vec<Arc<[u8]>>, (Error, bool)> {
        let own = &self.local.engine;
        if own.as_str() != engine {
            let sides = (("the request", engine), ("who answers", own.as_str()));
            let error = Error::mismatch_between("peers", "engine", sides.0, sides.1);
            return Err((error.with_kind(ErrorKind::Peer), false));
        }
        let cards = self.own_cards.replica(replica);
        cards.map_err(|error| (error.with_context("engine", own), true))
    }
}

/// Bytes of the cards from `offset` on, as many as go into a message.
fn part(cards: &[Arc<[u8]>], offset: u64) -> Vec<u8> {
    let mut skip = usize::try_from(offset).unwrap_or(usize::MAX);
    let mut bytes = Vec::new();
    for card in cards {
        let rest = card.get(skip..).unwrap_or_default();
        skip = skip.saturating_sub(card.len());
        let room = Message::MAX_PART - bytes.len();
        bytes.extend_from_slice(&rest[..rest.len().min(room)]);
    }
    bytes
}
