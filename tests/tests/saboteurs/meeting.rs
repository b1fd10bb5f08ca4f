//! The handshake, and who is who.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use kvx_core::backend::Submit;
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::{Incarnation, PeerId};
use kvx_core::{Error, ErrorKind, Result};

use crate::tools::lock;
use crate::wrapper::{At, Post, Sabotage};

type Met = Result<(PeerId, HandshakeBytes)>;

/// A handle that nobody gave out.
fn another(peer: PeerId) -> PeerId {
    PeerId::new(peer.slot() + 100, peer.generation())
}

#[derive(Default)]
pub(crate) struct SameIncarnation;

impl Sabotage for SameIncarnation {
    fn incarnation(&self, _: &At) -> Incarnation {
        Incarnation::from_bytes([7; 16])
    }
}

/// The initiator may not post before the acceptor finished.
#[derive(Default)]
pub(crate) struct WaitsForFinish {
    finished: AtomicBool,
}

impl Sabotage for WaitsForFinish {
    fn finish(&self, at: &At, completion: &HandshakeBytes) -> Result<PeerId> {
        self.finished.store(true, SeqCst);
        at.backend.finish(completion)
    }

    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        if !self.finished.load(SeqCst) {
            return Err(Error::misuse("submit", "not finished"));
        }
        post.to(at)
    }
}

#[derive(Default)]
pub(crate) struct FinishGivesAnother;

impl Sabotage for FinishGivesAnother {
    fn finish(&self, at: &At, completion: &HandshakeBytes) -> Result<PeerId> {
        at.backend.finish(completion).map(another)
    }
}

#[derive(Default)]
pub(crate) struct RepeatedOffer {
    seen: Mutex<BTreeSet<(usize, Vec<u8>)>>,
}

impl Sabotage for RepeatedOffer {
    fn accept(&self, at: &At, offer: &HandshakeBytes) -> Met {
        let (peer, reply) = at.backend.accept(offer)?;
        let fresh = lock(&self.seen).insert((at.index, offer.as_bytes().to_vec()));
        Ok((if fresh { peer } else { another(peer) }, reply))
    }
}

/// A side that has accepted an offer takes the reply to its own for another peer's.
#[derive(Default)]
pub(crate) struct CrossingMakesTwo {
    accepted: Mutex<BTreeSet<usize>>,
}

impl Sabotage for CrossingMakesTwo {
    fn accept(&self, at: &At, offer: &HandshakeBytes) -> Met {
        lock(&self.accepted).insert(at.index);
        at.backend.accept(offer)
    }

    fn complete(&self, at: &At, reply: &HandshakeBytes) -> Met {
        let (peer, completion) = at.backend.complete(reply)?;
        let crossed = lock(&self.accepted).contains(&at.index);
        Ok((if crossed { another(peer) } else { peer }, completion))
    }
}

/// What becomes of a message that is not right.
pub(crate) struct Reads {
    how: Read,
    offers: Mutex<Vec<Vec<u8>>>,
    replies: Mutex<Vec<Vec<u8>>>,
}

#[derive(Clone, Copy)]
pub(crate) enum Read {
    PanicsOnShort,
    FillsUpCut,
    BlamesCaller,
    MixesSteps,
    TakesOthersReplies,
}

impl Reads {
    pub(crate) fn new(how: Read) -> Self {
        Self { how, offers: Mutex::default(), replies: Mutex::default() }
    }
}

impl Sabotage for Reads {
    fn offer(&self, at: &At) -> Result<HandshakeBytes> {
        let offer = at.backend.offer()?;
        lock(&self.offers).push(offer.as_bytes().to_vec());
        Ok(offer)
    }

    fn accept(&self, at: &At, offer: &HandshakeBytes) -> Met {
        let bytes = offer.as_bytes();
        if matches!(self.how, Read::PanicsOnShort) {
            assert!(bytes.len() > 8, "index out of bounds");
        }
        let met = at.backend.accept(offer).or_else(|error| match self.how {
            Read::BlamesCaller => Err(error.with_kind(ErrorKind::Misuse)),
            Read::FillsUpCut => {
                let whole = lock(&self.offers).iter().find(|all| all.starts_with(bytes)).cloned();
                whole.map_or(Err(error), |whole| at.backend.accept(&HandshakeBytes::new(whole)?))
            }
            _ => Err(error),
        })?;
        lock(&self.replies).push(met.1.as_bytes().to_vec());
        Ok(met)
    }

    fn complete(&self, at: &At, reply: &HandshakeBytes) -> Met {
        at.backend.complete(reply).or_else(|error| {
            let known =
                |list: &Mutex<Vec<Vec<u8>>>| lock(list).iter().any(|b| b == reply.as_bytes());
            let taken = match self.how {
                Read::MixesSteps => known(&self.offers),
                Read::TakesOthersReplies => known(&self.replies),
                _ => false,
            };
            if taken { Ok((PeerId::new(55, 0), HandshakeBytes::new(vec![0])?)) } else { Err(error) }
        })
    }
}

/// Gives out the first handle again: to the same peer when it comes back, or to its next life.
pub(crate) struct FirstHandle {
    lives: bool,
    /// Who wrote a message.
    writers: Mutex<BTreeMap<Vec<u8>, usize>>,
    /// The first handle that a side gave to a peer.
    first: Mutex<BTreeMap<usize, Vec<(usize, PeerId)>>>,
}

impl FirstHandle {
    pub(crate) fn new(lives: bool) -> Self {
        Self { lives, writers: Mutex::default(), first: Mutex::default() }
    }

    fn wrote(&self, at: &At, bytes: &HandshakeBytes) {
        lock(&self.writers).insert(bytes.as_bytes().to_vec(), at.index);
    }

    fn handle(&self, at: &At, bytes: &HandshakeBytes, peer: PeerId) -> PeerId {
        let Some(writer) = lock(&self.writers).get(bytes.as_bytes()).copied() else { return peer };
        let mut all = lock(&self.first);
        let known = all.entry(at.index).or_default();
        // The side that was opened first is the one; all others are lives of its peer.
        let same = known.iter().find(|(other, _)| *other == writer || (self.lives && writer > 0));
        if let Some((_, first)) = same {
            return *first;
        }
        known.push((writer, peer));
        peer
    }
}

impl Sabotage for FirstHandle {
    fn offer(&self, at: &At) -> Result<HandshakeBytes> {
        let offer = at.backend.offer()?;
        self.wrote(at, &offer);
        Ok(offer)
    }

    fn accept(&self, at: &At, offer: &HandshakeBytes) -> Met {
        let (peer, reply) = at.backend.accept(offer)?;
        self.wrote(at, &reply);
        Ok((self.handle(at, offer, peer), reply))
    }

    fn complete(&self, at: &At, reply: &HandshakeBytes) -> Met {
        let (peer, completion) = at.backend.complete(reply)?;
        self.wrote(at, &completion);
        Ok((self.handle(at, reply, peer), completion))
    }

    fn finish(&self, at: &At, completion: &HandshakeBytes) -> Result<PeerId> {
        let peer = at.backend.finish(completion)?;
        Ok(self.handle(at, completion, peer))
    }

    fn connect(&self, _: &At, _: PeerId) -> Option<Result<()>> {
        Some(Ok(()))
    }
}

/// Connecting always works.
#[derive(Default)]
pub(crate) struct ConnectsToNobody;

impl Sabotage for ConnectsToNobody {
    fn connect(&self, _: &At, _: PeerId) -> Option<Result<()>> {
        Some(Ok(()))
    }
}
