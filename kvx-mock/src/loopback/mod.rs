//! A fabric for speed tests: no schedule, no log, no virtual time, only the copy.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kvx_core::id::Incarnation;
use kvx_core::{Error, Result};

use crate::error::BACKEND;
use crate::fabric::FabricId;

mod backend;
mod connection;
mod engine;
mod handshake;
mod inbox;
mod memory;

pub use backend::LoopbackBackend;
pub(crate) use backend::capabilities;
use connection::Connection;
use engine::Engine;

/// Its name among the presets.
pub(crate) const LOOPBACK: &str = "loopback";

/// What it calls its transport.
pub(crate) const TRANSPORT: &str = "mock-loopback";

/// A fabric in memory without the [`Fabric`](crate::Fabric)'s machinery: `submit` copies the bytes before it returns, and
/// the next poll reports it. For measuring what stands in front of a backend, and as an upper bound for what a backend can
/// reach. There is no seed, no virtual time, no rule and no event log; **it says nothing about how fast a fabric is**.
///
/// It keeps the contract: batches to a peer are visible in the order of posting, a peer's access can be revoked. Transfers
/// of one engine to one peer exclude each other; nothing is locked by the whole fabric while bytes move.
///
/// ```
/// use kvx_core::backend::TransferBackend as _;
/// use kvx_core::handshake::Handshake as _;
/// use kvx_mock::Loopback;
///
/// # fn main() -> kvx_core::Result<()> {
/// let loopback = Loopback::new()?;
/// let (one, other) = (loopback.backend("one")?, loopback.backend("other")?);
/// let (_, reply) = other.accept(&one.offer()?)?;
/// let (peer, completion) = one.complete(&reply)?;
/// other.finish(&completion)?;
/// assert_eq!(one.peer_info(peer)?.transport, "mock-loopback");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Loopback {
    pub(crate) hub: Arc<Hub>,
}

/// What all clones of a [`Loopback`] share: who is there, and who is connected. Locked by the control path only.
///
/// Locks are taken in this order: the hub, an engine's tables, a connection's lanes, an inbox. None is taken twice, and no
/// two tables or inboxes at once.
pub(crate) struct Hub {
    pub(crate) id: FabricId,
    state: Mutex<HubState>,
}

/// See [`Hub`].
#[derive(Default)]
struct HubState {
    engines: BTreeMap<Incarnation, Weak<Engine>>,
    /// The newest engine of each name.
    named: BTreeMap<Arc<str>, Weak<Engine>>,
    /// The live connection of two engines, the smaller incarnation first.
    pairs: BTreeMap<(Incarnation, Incarnation), Arc<Connection>>,
    last_connection: u64,
}

impl Loopback {
    /// A fabric of its own.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Resources`](kvx_core::ErrorKind::Resources): the operating system gave no random bytes.
    pub fn new() -> Result<Self> {
        Self::with_seed(0)
    }

    /// One among those that are told apart by a number.
    pub(crate) fn with_seed(seed: u64) -> Result<Self> {
        let id = FabricId { seed, process: *random()?.as_bytes() };
        Ok(Self { hub: Arc::new(Hub { id, state: Mutex::default() }) })
    }

    /// Opens an engine's backend. Opening another one with the same name gives another engine; faults by name are then the
    /// newest one's.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn backend(&self, name: impl Into<Arc<str>>) -> Result<Arc<LoopbackBackend>> {
        let name = name.into();
        let engine = Arc::new(Engine::new(random()?));
        let mut state = self.hub.lock();
        state.engines.insert(engine.incarnation, Arc::downgrade(&engine));
        state.named.retain(|_, engine| engine.strong_count() > 0);
        state.named.insert(name, Arc::downgrade(&engine));
        drop(state);
        Ok(Arc::new(LoopbackBackend::new(Arc::clone(&self.hub), engine)))
    }

    /// Ends the newest engine of this name without a word, as the death of its process does: its memory is gone, calls to
    /// its backend fail, its peers find out at once.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): there is no engine of this name.
    pub fn kill(&self, name: &str) -> Result<()> {
        let engine = self.newest("kill", name)?;
        self.hub.withdraw(&engine, engine::Life::Killed, "the peer is gone");
        Ok(())
    }

    /// Stops the newest engine of this name: its polls give nothing. Its memory is read and written all the same.
    ///
    /// # Errors
    ///
    /// As for [`kill`](Self::kill).
    pub fn stop(&self, name: &str) -> Result<()> {
        self.newest("stop", name)?.inbox.set_stopped(true);
        Ok(())
    }

    /// Lets an engine go on that was [stopped](Self::stop).
    ///
    /// # Errors
    ///
    /// As for [`kill`](Self::kill).
    pub fn resume(&self, name: &str) -> Result<()> {
        self.newest("resume", name)?.inbox.set_stopped(false);
        Ok(())
    }

    fn newest(&self, operation: &'static str, name: &str) -> Result<Arc<Engine>> {
        self.hub.lock().named.get(name).and_then(Weak::upgrade).ok_or_else(|| {
            Error::misuse(operation, format!("there is no engine of the name {name:?}"))
                .with_backend(BACKEND)
        })
    }
}

impl fmt::Debug for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loopback").finish_non_exhaustive()
    }
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, HubState> {
        lock(&self.state)
    }

    /// Ends every connection of an engine, those of a handshake that is not over included, and takes its memory from it.
    fn withdraw(&self, engine: &Arc<Engine>, life: engine::Life, reason: &'static str) {
        let mut state = self.lock();
        if !engine.end_life(life) {
            return;
        }
        let me = engine.incarnation;
        let theirs: Vec<_> =
            state.pairs.keys().filter(|pair| pair.0 == me || pair.1 == me).copied().collect();
        for pair in theirs {
            if let Some(connection) = state.pairs.remove(&pair) {
                connection.end(me, None, reason);
            }
        }
        state.engines.remove(&me);
        drop(state);
        // What backs memory is somebody else's code: it is dropped when nothing is locked.
        drop(engine.take_memory());
        if life == engine::Life::Killed {
            engine.inbox.clear();
        }
    }

    /// Ends one connection, from the side of `me`.
    fn end(&self, connection: &Arc<Connection>, me: Incarnation, theirs: &'static str) {
        let mut state = self.lock();
        let pair = connection.pair();
        if state.pairs.get(&pair).is_some_and(|live| Arc::ptr_eq(live, connection)) {
            state.pairs.remove(&pair);
        }
        connection.end(me, None, theirs);
    }
}

/// Sixteen bytes that nobody has drawn before.
#[expect(
    clippy::disallowed_methods,
    reason = "this fabric has no seed, and its engines are unlike any others"
)]
fn random() -> Result<Incarnation> {
    Incarnation::random()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
