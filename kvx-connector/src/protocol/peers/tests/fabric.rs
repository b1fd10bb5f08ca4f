//! One process's side of a fabric that only connects: what a backend does in a handshake, and a record of every connection.

use std::collections::BTreeMap;
use std::time::Duration;

use kvx_core::backend::PeerInfo;
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::{Incarnation, PeerId};
use kvx_core::{Error, ErrorKind};

use crate::protocol::peers::{Step, Stepped};

#[derive(Debug)]
pub(super) struct Fabric {
    own: Incarnation,
    transport: String,
    table: BTreeMap<Incarnation, PeerId>,
    pub(super) given: BTreeMap<PeerId, Given>,
    last: u32,
}

/// A connection that was made.
#[derive(Debug)]
pub(super) struct Given {
    pub(super) to: Incarnation,
    pub(super) at: Duration,
    /// How often this side ended it, gently and at once.
    pub(super) disconnected: u32,
    pub(super) severed: u32,
    /// The port has said that it is over.
    pub(super) down: bool,
}

impl Fabric {
    pub(super) fn new(own: Incarnation, transport: &str) -> Self {
        let (table, given) = (BTreeMap::new(), BTreeMap::new());
        Self { own, transport: transport.into(), table, given, last: 0 }
    }

    pub(super) fn work(&mut self, now: Duration, step: &Step) -> Stepped {
        let own = HandshakeBytes::new(self.own.as_bytes().to_vec()).unwrap();
        let fail = |what: &'static str| Stepped::Failed(Error::peer("fab", what));
        match step {
            Step::Offer { .. } => Stepped::Offered(own),
            Step::Accept { offer, .. } => match life(offer) {
                Some(to) => Stepped::Accepted(self.connect(now, to), own),
                None => fail("not an offer"),
            },
            Step::Complete { reply, .. } => match life(reply) {
                Some(to) => Stepped::Completed(self.connect(now, to), own),
                None => fail("not an answer"),
            },
            Step::Finish { completion, .. } => {
                match life(completion).and_then(|to| self.table.get(&to)) {
                    Some(peer) => Stepped::Finished(*peer, PeerInfo::new(&self.transport)),
                    None => fail("answers no offer"),
                }
            }
            Step::AddRegions { connection, regions } => {
                assert!(!regions.is_empty());
                match self.table.values().any(|peer| *peer == connection.peer) {
                    true => Stepped::Added(PeerInfo::new(&self.transport)),
                    false => Stepped::Failed(Error::new(ErrorKind::Misuse, "fab", "stale")),
                }
            }
        }
    }

    fn connect(&mut self, now: Duration, to: Incarnation) -> PeerId {
        if let Some(peer) = self.table.get(&to) {
            return *peer;
        }
        self.last += 1;
        let peer = PeerId::new(self.last, 0);
        self.table.insert(to, peer);
        let given = Given { to, at: now, disconnected: 0, severed: 0, down: false };
        self.given.insert(peer, given);
        peer
    }

    /// The connection to this life, made before this time, is over: gives it once.
    pub(super) fn break_off(&mut self, to: Incarnation, before: Duration) -> Option<PeerId> {
        let peer = *self.table.get(&to)?;
        if self.given[&peer].at > before {
            return None;
        }
        self.table.remove(&to)
    }

    /// This side ends it. `true` when it was not over.
    pub(super) fn end(&mut self, peer: PeerId) -> bool {
        let before = self.table.len();
        self.table.retain(|_, known| *known != peer);
        self.table.len() < before
    }
}

fn life(bytes: &HandshakeBytes) -> Option<Incarnation> {
    Some(Incarnation::from_bytes(bytes.as_bytes().try_into().ok()?))
}
