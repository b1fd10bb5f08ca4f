//! A clause: one sentence of the contract, and the script that holds a backend to it.

use std::fmt;

use kvx_core::ErrorKind;
use kvx_core::capability::{Capabilities, Ordering, Revoke};
use kvx_core::transfer::Mode;

use super::command::Refusal;
use super::subject::Fault;
use super::world::World;

/// One clause of the contract.
#[derive(Clone, Copy)]
pub struct Clause {
    pub(crate) name: &'static str,
    pub(crate) point: Point,
    pub(crate) about: &'static str,
    pub(crate) saboteurs: &'static [&'static str],
    pub(crate) needs: &'static [Need],
    pub(crate) faults: &'static [Fault],
    pub(crate) here_only: bool,
    pub(crate) once: bool,
    pub(crate) run: fn(&World) -> Verdict,
}

/// What a clause needs the two sides to claim: a reason to leave it out, or nothing.
pub(crate) type Need = fn(&Claims) -> Result<(), String>;

impl Clause {
    /// A clause. `saboteurs` are the names of backends with one deliberate fault each that it must find out: a clause that
    /// nothing can fail is no clause, so an empty list does not compile.
    pub(crate) const fn new(
        name: &'static str,
        point: Point,
        about: &'static str,
        saboteurs: &'static [&'static str],
        run: fn(&World) -> Verdict,
    ) -> Self {
        assert!(!saboteurs.is_empty(), "a clause without a saboteur");
        Self {
            name,
            point,
            about,
            saboteurs,
            needs: &[],
            faults: &[],
            here_only: false,
            once: false,
            run,
        }
    }

    /// Holds only for backends that claim this.
    pub(crate) const fn needs(mut self, needs: &'static [Need]) -> Self {
        self.needs = needs;
        self
    }

    /// Needs the peer to be killed or stopped.
    pub(crate) const fn faults(mut self, faults: &'static [Fault]) -> Self {
        self.faults = faults;
        self
    }

    /// Looks inside this process, so a peer in another one adds nothing.
    pub(crate) const fn here_only(mut self) -> Self {
        self.here_only = true;
        self
    }

    /// Takes nothing from the seed, and its time: one run is enough.
    pub(crate) const fn once(mut self) -> Self {
        self.once = true;
        self
    }

    /// Its name: `data.read.exact`, say.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// One sentence: what must hold.
    #[must_use]
    pub const fn about(&self) -> &'static str {
        self.about
    }

    /// The point of the contract to which it belongs.
    #[must_use]
    pub const fn point(&self) -> Point {
        self.point
    }

    /// The saboteurs that it finds out.
    #[must_use]
    pub const fn saboteurs(&self) -> &'static [&'static str] {
        self.saboteurs
    }
}

impl fmt::Debug for Clause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Clause").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A point of the contract: the nine of [`kvx_core::backend`], and what its traits' documentation promises beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Point {
    /// Exactly once for every transfer.
    Settled,
    /// *Settled* and *notified* mean visible.
    Visible,
    /// After the data, at most once, whoever polls.
    Notified,
    /// Nobody depends on the other side's polling.
    Progress,
    /// Cancelling is best effort.
    Cancelled,
    /// Severed transfers settle within a bound.
    Severed,
    /// *Peer down* comes last.
    PeerDown,
    /// Stale handles are errors.
    Stale,
    /// `Full` and errors post nothing.
    NothingPosted,
    /// [`kvx_core::memory::MemoryRegistry`].
    Memory,
    /// [`kvx_core::handshake::Handshake`].
    Handshake,
    /// [`kvx_core::capability::Capabilities`].
    Claims,
    /// [`kvx_core::backend::TransferBackend::revoke`].
    Revoked,
    /// [`kvx_core::backend::TransferBackend::close`], and what is left behind.
    Closed,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Settled => "1, settled exactly once",
            Self::Visible => "2, settled and notified mean visible",
            Self::Notified => "3, notified after the data and at most once",
            Self::Progress => "4, nobody depends on the other side's polling",
            Self::Cancelled => "5, settled is the only proof of quiet",
            Self::Severed => "6, severed transfers settle within a bound",
            Self::PeerDown => "7, peer down comes last",
            Self::Stale => "8, a stale handle is an error",
            Self::NothingPosted => "9, full and errors post nothing",
            Self::Memory => "registered memory",
            Self::Handshake => "the handshake",
            Self::Claims => "capabilities",
            Self::Revoked => "revoke",
            Self::Closed => "closing, and what it costs to be there",
        })
    }
}

/// Whether a clause held.
pub(crate) type Verdict<T = ()> = Result<T, Breach>;

/// How a clause was broken.
#[derive(Clone, Debug)]
pub(crate) struct Breach {
    text: String,
    refusal: Option<Refusal>,
}

impl Breach {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), refusal: None }
    }

    /// The backend returned an error where the script had no use for one.
    pub(crate) fn refused(side: &str, operation: &str, refusal: Refusal) -> Self {
        let text =
            format!("`{operation}` failed at {side}: {} error: {}", refusal.kind, refusal.text);
        Self { text, refusal: Some(refusal) }
    }

    /// The backend's error, if that is what it was.
    pub(crate) const fn refusal(&self) -> Option<&Refusal> {
        self.refusal.as_ref()
    }
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Ends a clause with a [`Breach`] unless the condition holds.
macro_rules! ensure {
    ($holds:expr, $($text:tt)+) => {
        if !$holds {
            return Err($crate::suite::clause::Breach::new(format!($($text)+)));
        }
    };
}
pub(crate) use ensure;

/// Demands that a call was refused, with an error of one of these kinds.
pub(crate) fn refused<T>(what: &str, result: Verdict<T>, kinds: &[ErrorKind]) -> Verdict<Refusal> {
    let Err(breach) = result else {
        return Err(Breach::new(format!("{what} was accepted")));
    };
    let Some(refusal) = breach.refusal() else { return Err(breach) };
    let wanted: Vec<_> = kinds.iter().map(|kind| kind.as_str()).collect();
    ensure!(
        kinds.contains(&refusal.kind),
        "{what} must be refused with a {} error; it was a {} error: {}",
        wanted.join(" or "),
        refusal.kind,
        refusal.text
    );
    Ok(refusal.clone())
}

/// What the two sides claim, as opened.
#[derive(Clone, Debug)]
pub(crate) struct Claims {
    pub(crate) one: Capabilities,
    pub(crate) other: Capabilities,
}

fn all(holds: bool, otherwise: impl Into<String>) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise.into()) }
}

pub(crate) fn reads(claims: &Claims) -> Result<(), String> {
    all(claims.one.mode(Mode::Read) && claims.other.mode(Mode::Read), "it does not claim reads")
}

pub(crate) fn writes(claims: &Claims) -> Result<(), String> {
    all(claims.one.mode(Mode::Write) && claims.other.mode(Mode::Write), "it does not claim writes")
}

pub(crate) fn no_cuda(claims: &Claims) -> Result<(), String> {
    all(!claims.one.cuda_memory, "it claims memory of CUDA devices")
}

pub(crate) fn ordered(claims: &Claims) -> Result<(), String> {
    all(claims.one.ordering == Ordering::PerPeer, "it claims no order of batches")
}

pub(crate) fn revokes_peers(claims: &Claims) -> Result<(), String> {
    all(claims.one.revoke == Revoke::PerPeer, "it does not claim to revoke a peer's access")
}

pub(crate) fn revokes_no_peers(claims: &Claims) -> Result<(), String> {
    all(claims.one.revoke != Revoke::PerPeer, "it claims to revoke a peer's access")
}

pub(crate) fn revokes_regions(claims: &Claims) -> Result<(), String> {
    all(claims.one.revoke == Revoke::PerRegion, "it does not claim to revoke a region")
}

pub(crate) fn event_descriptor(claims: &Claims) -> Result<(), String> {
    all(claims.one.event_fd, "it claims no descriptor to sleep on")
}

/// Notifications that can be told apart.
pub(crate) fn notes(claims: &Claims) -> Result<(), String> {
    let bytes =
        claims.one.limits.max_notification_bytes.min(claims.other.limits.max_notification_bytes);
    all(bytes >= 4, format!("a notification has at most {bytes} bytes"))
}

pub(crate) fn bounded_notes(claims: &Claims) -> Result<(), String> {
    let bytes = claims.one.limits.max_notification_bytes;
    all(bytes < 1 << 20, format!("a notification may have {bytes} bytes"))
}

pub(crate) fn bounded_segments(claims: &Claims) -> Result<(), String> {
    let bytes = claims.one.limits.max_segment_bytes;
    all(bytes <= 1 << 24, format!("a segment may have {bytes} bytes"))
}

pub(crate) fn bounded_batches(claims: &Claims) -> Result<(), String> {
    let segments = claims.one.limits.max_batch_segments;
    all(segments <= 1 << 14, format!("a batch may have {segments} segments"))
}

pub(crate) fn bounded_in_flight(claims: &Claims) -> Result<(), String> {
    let batches = claims.one.limits.max_in_flight;
    all(batches <= 1 << 12, format!("{batches} batches may be in flight"))
}

pub(crate) fn several_in_flight(claims: &Claims) -> Result<(), String> {
    let batches = claims.one.limits.max_in_flight;
    all(batches >= 4, format!("at most {batches} batches may be in flight"))
}

/// Segments large enough that megabytes can be moved in a test.
pub(crate) fn large_segments(claims: &Claims) -> Result<(), String> {
    let bytes = claims.one.limits.max_segment_bytes;
    all(bytes >= 4096, format!("a segment has at most {bytes} bytes"))
}

/// The bytes of a region whose last offsets need more than 32 bits.
pub(crate) const HUGE: u64 = (1 << 32) + (1 << 16);

/// A process that may map more than 4 GiB.
pub(crate) fn huge_memory(_: &Claims) -> Result<(), String> {
    let mapped = kvx_core::memory::Region::host(HUGE);
    mapped.map(drop).map_err(|error| format!("this process may not map {HUGE} bytes: {error}"))
}

/// A kernel that says how much memory a process uses.
pub(crate) fn counts_memory(_: &Claims) -> Result<(), String> {
    std::fs::read_to_string("/proc/self/status")
        .map(drop)
        .map_err(|error| format!("/proc/self/status, which says how much memory is used: {error}"))
}

pub(crate) fn limits_differ(claims: &Claims) -> Result<(), String> {
    all(claims.one.limits != claims.other.limits, "both sides have the same limits")
}
