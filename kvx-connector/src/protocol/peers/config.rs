//! What a [`Peers`](super::Peers) is given when it is made.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::PeerInfo;
use kvx_core::card::{CardReader, EngineName};
use kvx_core::facts::Facts;
use kvx_core::id::Incarnation;
use kvx_core::layout::{RankCoords, RankLayout};
use kvx_core::{Error, Result};

use crate::select::{Policy, choose};

/// Who this side is.
#[derive(Clone, Debug)]
pub struct Local {
    /// The engine's name.
    pub engine: EngineName,
    /// The life of this process: of the rank, or of the scheduler that only serves cards. It is what sessions say.
    pub incarnation: Incarnation,
    /// The life of the engine, drawn by its scheduler: what [`LeaseName`](crate::protocol::LeaseName)s say.
    pub life: Incarnation,
    /// What must be equal on both sides.
    pub facts: Facts,
    /// The rank; `None` of a process that only serves cards.
    pub rank: Option<LocalRank>,
}

/// A rank, which meets others.
#[derive(Clone, Debug)]
pub struct LocalRank {
    /// Which one.
    pub coords: RankCoords,
    /// The layouts of all ranks of its replica, in order.
    pub layouts: Vec<RankLayout>,
    /// The backends that it has opened.
    pub backends: Vec<&'static str>,
    /// Its encoded card, to be sent along with what begins a handshake: those who write into its memory need it. `None` where
    /// nobody does.
    pub card: Option<Arc<[u8]>>,
}

/// How long and how many. All times are bounds of this side's.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// How long one attempt to fetch cards, or to meet a rank, may take.
    pub attempt: Duration,
    /// A question that was not answered is put again after this time.
    pub again: Duration,
    /// Attempts that may be young at the same time; others wait for their turn.
    pub young_attempts: usize,
    /// How long an attempt is young. One that takes longer, because the other side is slow or dead, goes on, and holds up
    /// nobody.
    pub young: Duration,
    /// Shortest pause after an attempt that failed. Doubles with each, and is shortened by up to half at random.
    pub first_pause: Duration,
    /// Longest such pause.
    pub longest_pause: Duration,
    /// A connection that breaks sooner than this is an attempt that failed: then, too, there is a pause before the next.
    pub proven: Duration,
    /// How long a refusal that cannot change by itself is remembered. Then the engine is asked anew, when somebody wants it.
    pub refusal: Duration,
    /// How long a want waits before it is told of a limit that has left nothing for an attempt, which is repeated all the same while
    /// others wait.
    pub starved: Duration,
    /// How long a peer without a session, but with a connection, is kept.
    pub alone: Duration,
    /// How long a connection may take to end: then it is severed; then it is no longer waited for.
    pub ending: Duration,
    /// Longest wait of a [`Want`](super::Want).
    pub longest_want: Duration,
    /// How long a life that another one has replaced is remembered, since it was last heard of, so that it does not replace that one
    /// in turn. It counts only while that one is there.
    pub superseded: Duration,
    /// Most wants that wait.
    pub wants: usize,
    /// Most addresses of engines.
    pub sites: usize,
    /// Most ranks of other engines.
    pub peers: usize,
    /// Most ranks of one replica of an engine.
    pub ranks: usize,
    /// Most sessions.
    pub sessions: usize,
    /// Most bytes of all cards of one replica of an engine.
    pub cards_bytes: usize,
    /// Most handshakes that others began and that are not yet over.
    pub answering: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            attempt: Duration::from_secs(5),
            again: Duration::from_secs(1),
            young_attempts: 64,
            young: Duration::from_millis(100),
            first_pause: Duration::from_millis(50),
            longest_pause: Duration::from_secs(5),
            proven: Duration::from_secs(1),
            refusal: Duration::from_secs(10),
            starved: Duration::from_secs(2),
            alone: Duration::from_secs(5),
            ending: Duration::from_secs(5),
            longest_want: Duration::from_secs(60),
            superseded: Duration::from_secs(600),
            wants: 65_536,
            sites: 16_384,
            peers: 16_384,
            ranks: 1024,
            sessions: 65_536,
            cards_bytes: 64 << 20,
            answering: 1024,
        }
    }
}

/// What a [`Peers`](super::Peers) is given when it is made.
#[derive(Debug)]
pub struct Setup {
    /// Who this side is.
    pub local: Local,
    /// How long and how many.
    pub limits: Limits,
    /// What is accepted as a card.
    pub reader: CardReader,
    /// Which backend to take for whom.
    pub choosing: Box<dyn Choosing>,
    /// Where the chance of pauses begins: drawn at random, so that many ranks do not come back at the same moment.
    pub seed: u64,
}

impl Setup {
    /// With the usual limits.
    #[must_use]
    pub fn new(local: Local, choosing: Box<dyn Choosing>, seed: u64) -> Self {
        Self { local, limits: Limits::default(), reader: CardReader::default(), choosing, seed }
    }
}

/// Which backend to take, among those that both sides have.
pub trait Choosing: fmt::Debug + Send {
    /// Chooses. `offers` are the peer's, of backends that this rank has opened, as [`offers`](crate::offers) writes them.
    ///
    /// # Errors
    ///
    /// None can be used, or the one that was named cannot.
    fn choose(&self, offers: &[&str]) -> Result<Chosen>;

    /// Whether a connection may run over what it runs over.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`](kvx_core::ErrorKind::Unsupported), naming the transport and those allowed.
    fn check_transport(&self, info: &PeerInfo) -> Result<(), Error>;
}

/// A backend that was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Its name.
    pub backend: &'static str,
    /// Why it was chosen.
    pub reason: String,
}

impl Choosing for Policy {
    fn choose(&self, offers: &[&str]) -> Result<Chosen> {
        let choice = choose(self, Some(offers))?;
        Ok(Chosen { backend: choice.registration.name, reason: choice.to_string() })
    }

    fn check_transport(&self, info: &PeerInfo) -> Result<(), Error> {
        Self::check_transport(self, info)
    }
}
