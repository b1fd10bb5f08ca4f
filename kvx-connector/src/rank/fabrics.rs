//! A rank's backends: its memory registered with each, the steps of handshakes, and what is in flight.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use kvx_core::backend::{PeerInfo, TransferBackend};
use kvx_core::capability::{Capabilities, Limits, Revoke};
use kvx_core::card::Offer;
use kvx_core::config::BackendConfig;
use kvx_core::id::PeerId;
use kvx_core::memory::Region;
use kvx_core::port::{Port, RegionSet, Transfer, TransferReport};
use kvx_core::transfer::{Mode, Segment};
use kvx_core::{Error, Result};

use crate::protocol::TransferNumber;
use crate::protocol::peers::{Connection, Step, StepId, Stepped};

/// Something asynchronous that is polled at each step, and that nobody but the step waits for.
type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// One backend of the rank.
struct Fabric {
    port: Port,
    set: RegionSet,
}

/// All of them, and what is under way on them.
pub(super) struct Fabrics {
    list: BTreeMap<&'static str, Fabric>,
    /// Connections that are being made ready: the step, and what is left of it.
    steps: Vec<(StepId, Work<Result<PeerInfo>>)>,
    /// Connections that end gently.
    leaving: Vec<(Connection, Work<Result<()>>)>,
    flights: BTreeMap<TransferNumber, Flight>,
}

/// A transfer that has not settled.
struct Flight {
    transfer: Transfer,
    connection: Connection,
}

/// What a poll has found.
#[derive(Debug)]
pub(super) enum Found {
    /// A step of a handshake is over.
    Stepped(StepId, Stepped),
    /// A transfer has settled.
    Settled(TransferNumber, Connection, Result<TransferReport>),
    /// A notification came.
    Notified(Connection, Vec<u8>),
    /// A connection is over.
    Down(Connection, Option<Error>),
}

impl Fabrics {
    /// Registers the rank's memory with each backend.
    pub(super) fn new(backends: Vec<Arc<dyn TransferBackend>>, regions: &[Region]) -> Result<Self> {
        let mut list = BTreeMap::new();
        for backend in backends {
            let name = backend.name();
            let port = Port::new(backend)?;
            let ids =
                regions.iter().map(|region| port.register(region)).collect::<Result<Vec<_>>>()?;
            let set = port.region_set(&ids)?;
            if list.insert(name, Fabric { port, set }).is_some() {
                return Err(
                    Error::config("rank", "two backends of one name").with_context("backend", name)
                );
            }
        }
        Ok(Self { list, steps: Vec::new(), leaving: Vec::new(), flights: BTreeMap::new() })
    }

    /// What the rank's card says of each.
    pub(super) fn offers(&self) -> Result<Vec<Offer>> {
        let offers = self.list.iter().map(|(name, fabric)| {
            let keys: Result<Vec<_>> =
                fabric.set.ids().map(|id| fabric.port.key_blob(id)).collect();
            let offer = Offer::new(*name, fabric.port.offer()?, keys?)?;
            // Who reads the card is told where this backend reaches.
            match &fabric.port.capabilities().place {
                Some(place) => {
                    offer.with_options(BackendConfig::new().with("place", place.clone()))
                }
                None => Ok(offer),
            }
        });
        offers.collect()
    }

    pub(super) fn names(&self) -> Vec<&'static str> {
        self.list.keys().copied().collect()
    }

    /// The ports, for whoever waits on them.
    pub(super) fn ports(&self) -> impl Iterator<Item = &Port> {
        self.list.values().map(|fabric| &fabric.port)
    }

    fn fabric(&self, backend: &str) -> Result<&Fabric> {
        self.list.get(backend).ok_or_else(|| {
            Error::misuse("rank", "this rank has not opened the backend")
                .with_context("backend", backend)
        })
    }

    pub(super) fn capabilities(&self, backend: &str) -> Result<&Capabilities> {
        Ok(self.fabric(backend)?.port.capabilities())
    }

    pub(super) fn limits(&self, backend: &str) -> Result<&Limits> {
        Ok(&self.capabilities(backend)?.limits)
    }

    /// Begins a step of a handshake. `None`: it takes a while.
    pub(super) fn step(&mut self, id: StepId, step: Step) -> Option<Stepped> {
        let done = self.try_step(id, step);
        done.unwrap_or_else(|error| Some(Stepped::Failed(error)))
    }

    fn try_step(&mut self, id: StepId, step: Step) -> Result<Option<Stepped>> {
        Ok(Some(match step {
            Step::Offer { backend } => Stepped::Offered(self.fabric(backend)?.port.offer()?),
            Step::Accept { backend, offer } => {
                let (peer, reply) = self.fabric(backend)?.port.accept(&offer)?;
                Stepped::Accepted(peer, reply)
            }
            Step::Complete { backend, reply } => {
                let (peer, completion) = self.fabric(backend)?.port.complete(&reply)?;
                Stepped::Completed(peer, completion)
            }
            Step::Finish { backend, completion } => {
                let port = &self.fabric(backend)?.port;
                let peer = port.finish(&completion)?;
                Stepped::Finished(peer, port.peer_info(peer)?)
            }
            Step::AddRegions { connection, regions } => {
                let port = self.fabric(connection.backend)?.port.clone();
                port.add_regions(connection.peer, &regions)?;
                let mut work: Work<Result<PeerInfo>> = Box::pin(async move {
                    port.connect(connection.peer).await?;
                    port.peer_info(connection.peer)
                });
                match look(&mut work) {
                    Some(info) => Stepped::Added(info?),
                    None => {
                        self.steps.push((id, work));
                        return Ok(None);
                    }
                }
            }
        }))
    }

    /// Ends a connection once what was begun has settled.
    pub(super) fn disconnect(&mut self, connection: Connection) {
        let Ok(fabric) = self.fabric(connection.backend) else { return };
        let port = fabric.port.clone();
        let mut work: Work<Result<()>> =
            Box::pin(async move { port.disconnect(connection.peer).await });
        if look(&mut work).is_none() {
            self.leaving.push((connection, work));
        }
    }

    /// Ends a connection at once.
    pub(super) fn sever(&mut self, connection: Connection) {
        self.leaving.retain(|(leaving, _)| *leaving != connection);
        if let Ok(fabric) = self.fabric(connection.backend) {
            // An error says that it is down already, and that is or was told.
            let _down = fabric.port.sever(connection.peer);
        }
    }

    /// Ends a peer's access to this rank's memory, where the backend can. Returns whether it has ended.
    pub(super) fn revoke(&mut self, connection: Connection) -> bool {
        self.fabric(connection.backend)
            .is_ok_and(|fabric| fabric.port.revoke(connection.peer).is_ok())
    }

    /// Whether a connection that is over has ended the peer's access to this rank's memory with it.
    pub(super) fn down_is_quiet(&self, connection: Connection) -> bool {
        self.capabilities(connection.backend).is_ok_and(|can| can.revoke == Revoke::PerPeer)
    }

    /// Posts a transfer. Gives what it was, where it has settled within the call.
    pub(super) fn post(
        &mut self,
        number: TransferNumber,
        connection: Connection,
        mode: Mode,
        segments: &[Segment],
    ) -> Result<Option<Result<TransferReport>>> {
        let fabric = self.fabric(connection.backend)?;
        let mut transfer =
            fabric.port.transfer(connection.peer, mode, &fabric.set, segments, None)?;
        if transfer.is_settled() {
            return Ok(transfer.try_result());
        }
        self.flights.insert(number, Flight { transfer, connection });
        Ok(None)
    }

    /// Sends a message as a notification. Returns whether it was taken.
    pub(super) fn notify(&self, connection: Connection, message: &[u8]) -> bool {
        let Ok(fabric) = self.fabric(connection.backend) else { return false };
        let limit = u64::from(fabric.port.capabilities().limits.max_notification_bytes);
        if message.len() as u64 > limit {
            return false;
        }
        // Dropping the handle does not cancel it; whether it arrived is seen by the answer.
        fabric.port.transfer(connection.peer, Mode::Read, &fabric.set, &[], Some(message)).is_ok()
    }

    pub(super) fn cancel(&self, number: TransferNumber) {
        if let Some(flight) = self.flights.get(&number) {
            flight.transfer.cancel();
        }
    }

    /// Whether something is under way that only polling brings forward.
    pub(super) fn is_busy(&self) -> bool {
        !self.steps.is_empty() || !self.leaving.is_empty()
    }

    /// Polls everything. What has settled comes before the end of its connection.
    pub(super) fn poll(&mut self, found: &mut Vec<Found>) {
        for fabric in self.list.values() {
            while fabric.port.poll() > 0 {}
        }
        self.steps.retain_mut(|(id, work)| {
            let Some(result) = look(work) else { return true };
            let stepped = result.map_or_else(Stepped::Failed, Stepped::Added);
            found.push(Found::Stepped(*id, stepped));
            false
        });
        self.leaving.retain_mut(|(_, work)| look(work).is_none());
        let settled: Vec<TransferNumber> = self
            .flights
            .iter()
            .filter(|(_, flight)| flight.transfer.is_settled())
            .map(|(number, _)| *number)
            .collect();
        for number in settled {
            let Some(mut flight) = self.flights.remove(&number) else { continue };
            if let Some(result) = flight.transfer.try_result() {
                found.push(Found::Settled(number, flight.connection, result));
            }
        }
        for (backend, fabric) in &self.list {
            let connection = |peer: PeerId| Connection { backend, peer };
            while let Some((peer, payload)) = fabric.port.next_notification() {
                found.push(Found::Notified(connection(peer), payload));
            }
            while let Some((peer, error)) = fabric.port.next_peer_down() {
                found.push(Found::Down(connection(peer), error));
            }
        }
    }
}

/// Polls something once.
pub(super) fn look<T>(work: &mut Work<T>) -> Option<T> {
    match work.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

impl fmt::Debug for Fabrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabrics")
            .field("backends", &self.names())
            .field("steps", &self.steps.len())
            .field("leaving", &self.leaving.len())
            .field("flights", &self.flights.len())
            .finish()
    }
}
