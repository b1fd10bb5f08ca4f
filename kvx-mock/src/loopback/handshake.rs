//! How two engines meet.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use kvx_core::Result;
use kvx_core::handshake::{Handshake, HandshakeBytes};
use kvx_core::id::{Incarnation, PeerId};

use super::backend::LoopbackBackend;
use super::connection::Connection;
use super::engine::{Engine, Side};
use super::{HubState, LOOPBACK};
use crate::error::{down, malformed, unpolled};
use crate::handshake::{Kind, Message, Reader};
use crate::memory::too_many;

impl Handshake for LoopbackBackend {
    fn incarnation(&self) -> Incarnation {
        self.engine.incarnation
    }

    fn offer(&self) -> Result<HandshakeBytes> {
        let mut tables = self.engine.tables_mut();
        tables.check_open("offer")?;
        tables.offered = true;
        drop(tables);
        self.message(Kind::Offer, Incarnation::from_bytes([0; 16]), 0)
    }

    fn accept(&self, offer: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        let message = self.read("accept", Kind::Offer, offer)?;
        let mut hub = self.hub.lock();
        let other = hub.sender("accept", &message)?;
        let connection = hub.connection(&self.engine, &other);
        let peer = self.join(&connection)?;
        drop(hub);
        Ok((peer, self.message(Kind::Reply, message.from, connection.number)?))
    }

    fn complete(&self, reply: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        let operation = "complete";
        let message = self.read(operation, Kind::Reply, reply)?;
        if !self.engine.tables().offered {
            return Err(malformed(operation, "a reply, but this side made no offer"));
        }
        let hub = self.hub.lock();
        let connection = hub.current(operation, self.engine.incarnation, &message)?;
        let peer = self.join(&connection)?;
        connection.ends[connection.end_of(self.engine.incarnation)].ready.store(true, Release);
        drop(hub);
        Ok((peer, self.message(Kind::Completion, message.from, message.connection)?))
    }

    fn finish(&self, completion: &HandshakeBytes) -> Result<PeerId> {
        let operation = "finish";
        let message = self.read(operation, Kind::Completion, completion)?;
        let hub = self.hub.lock();
        let connection = hub.current(operation, self.engine.incarnation, &message)?;
        let end = &connection.ends[connection.end_of(self.engine.incarnation)];
        let peer = end
            .peer
            .get()
            .ok_or_else(|| malformed(operation, "a completion, but this side accepted no offer"))?;
        end.ready.store(true, Release);
        Ok(*peer)
    }
}

impl LoopbackBackend {
    fn read(&self, operation: &'static str, kind: Kind, bytes: &HandshakeBytes) -> Result<Message> {
        self.engine.tables().check_open(operation)?;
        let (fabric, me) = (self.hub.id, self.engine.incarnation);
        Message::read(operation, kind, bytes, &Reader { fabric, preset: LOOPBACK, me })
    }

    fn message(&self, kind: Kind, to: Incarnation, connection: u64) -> Result<HandshakeBytes> {
        let (fabric, from) = (self.hub.id, self.engine.incarnation);
        Message { kind, fabric, from, to, connection, preset: LOOPBACK.into() }.encode()
    }

    /// This engine's handle of the other side of a live connection, made if there is none. The hub is locked.
    fn join(&self, connection: &Arc<Connection>) -> Result<PeerId> {
        let operation = "handshake";
        let end = connection.end_of(self.engine.incarnation);
        if let Some(peer) = connection.ends[end].peer.get() {
            return Ok(*peer);
        }
        if self.engine.inbox.is_full_of_downs() {
            return Err(unpolled(operation));
        }
        let mut tables = self.engine.tables_mut();
        tables.check_open(operation)?;
        let side = Side { connection: Arc::clone(connection), end, keys: BTreeSet::new() };
        let peer = tables.peers.insert(side).ok_or_else(|| too_many(operation))?;
        Ok(*connection.ends[end].peer.get_or_init(|| peer))
    }
}

impl HubState {
    /// The engine that sent a message.
    fn sender(&self, operation: &'static str, message: &Message) -> Result<Arc<Engine>> {
        self.engines.get(&message.from).and_then(std::sync::Weak::upgrade).ok_or_else(|| {
            down(operation, "the peer is gone").with_context("incarnation", message.from)
        })
    }

    /// The live connection of two engines, made if there is none.
    fn connection(&mut self, one: &Arc<Engine>, other: &Arc<Engine>) -> Arc<Connection> {
        let (a, b) = (one.incarnation, other.incarnation);
        let pair = (a.min(b), a.max(b));
        if let Some(connection) = self.pairs.get(&pair) {
            return Arc::clone(connection);
        }
        self.last_connection += 1;
        let connection = Arc::new(Connection::new(self.last_connection, one, other));
        self.pairs.insert(pair, Arc::clone(&connection));
        connection
    }

    /// The connection to which a message belongs, if it is the live one of the two.
    fn current(
        &self,
        operation: &'static str,
        me: Incarnation,
        message: &Message,
    ) -> Result<Arc<Connection>> {
        let pair = (me.min(message.from), me.max(message.from));
        let live = self.pairs.get(&pair).filter(|live| live.number == message.connection);
        live.cloned().ok_or_else(|| {
            down(operation, "the connection that it belongs to is over")
                .with_context("incarnation", message.from)
        })
    }
}
