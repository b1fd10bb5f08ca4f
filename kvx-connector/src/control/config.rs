//! Who this side is, whom it talks to, and how much of everything there may be.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use kvx_core::card::{Address, EngineName, FeatureSet, Host, SchemaRange};
use kvx_core::id::Incarnation;
use kvx_core::layout::RankCoords;
use kvx_core::{Error, Result};

use super::Key;

/// Who is at the other end of a session: one life of one process of an engine. All of it was said under the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteIdentity {
    /// The engine.
    pub engine: EngineName,
    /// This life of the process: another one after every start, at whatever address.
    pub incarnation: Incarnation,
    /// Which rank of the engine it is; `None` for the engine's scheduler.
    pub rank: Option<RankCoords>,
}

impl fmt::Display for RemoteIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.rank {
            Some(rank) => write!(f, "{} {rank} ({})", self.engine, self.incarnation),
            None => write!(f, "{} scheduler ({})", self.engine, self.incarnation),
        }
    }
}

/// Which messages one side speaks. Two sides agree where their ranges of schemas meet and each knows what the other requires;
/// nobody asks for equal versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The schemas of its messages.
    pub schemas: SchemaRange,
    /// Features that the other side must know.
    pub required: FeatureSet,
    /// Features that it knows: those that it requires are among them.
    pub known: FeatureSet,
}

impl Versions {
    /// What this version of kvx speaks.
    pub const CURRENT: Self = Self {
        schemas: match SchemaRange::new(1, 1) {
            Some(schemas) => schemas,
            None => SchemaRange::CURRENT,
        },
        required: FeatureSet::NONE,
        known: FeatureSet::NONE,
    };

    /// What both speak.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`](kvx_core::ErrorKind::Unsupported), with the field and both values: there is no common
    /// schema, or one side requires a feature that the other does not know.
    pub fn agree(&self, theirs: &Self) -> Result<Agreed> {
        let remedy = "run versions of kvx that can talk to each other";
        let Some(schema) = self.schemas.common(theirs.schemas) else {
            return Err(Error::mismatch_between(
                "control",
                "schema",
                ("this side", self.schemas),
                ("the peer", theirs.schemas),
            )
            .with_remedy(remedy));
        };
        let differ = |left: (&'static str, FeatureSet), right: (&'static str, FeatureSet)| {
            Err(Error::mismatch_between("control", "features", left, right).with_remedy(
                "run a newer version on the side that lacks it, or turn it off on the other",
            ))
        };
        if !self.known.contains(theirs.required) {
            return differ(("this side knows", self.known), ("the peer requires", theirs.required));
        }
        if !theirs.known.contains(self.required) {
            return differ(("this side requires", self.required), ("the peer knows", theirs.known));
        }
        let both = self.known.bits() & theirs.known.bits();
        Ok(Agreed { schema, features: FeatureSet::from_bits(both) })
    }
}

/// What both sides of a session speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Agreed {
    /// The newest schema that both speak: that of the session's messages.
    pub schema: u16,
    /// The features that both know.
    pub features: FeatureSet,
}

/// How a stranger is told from an engine of the deployment.
///
/// ```
/// use kvx_connector::control::{Key, Security};
///
/// let key = Key::generate()?;
/// let old = Key::generate()?;
/// let while_keys_are_changed = Security::with_key(key).accepting(old);
/// let on_one_host = Security::plaintext_on_loopback();
/// let in_a_closed_network = Security::plaintext_on_loopback().and_beyond_loopback();
/// # Ok::<(), kvx_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Security {
    keys: Vec<Key>,
    beyond_loopback: bool,
}

impl Security {
    /// Most keys that one side accepts.
    pub const MAX_KEYS: usize = 4;

    /// Sessions are encrypted, with those that have this key.
    #[must_use]
    pub fn with_key(key: Key) -> Self {
        Self { keys: vec![key], beyond_loopback: true }
    }

    /// Accepts this key as well when dialled: for the time in which the engines of a deployment are given a new one.
    #[must_use]
    pub fn accepting(mut self, key: Key) -> Self {
        self.keys.push(key);
        self
    }

    /// No key: whoever reaches the address is taken for an engine, and everybody on the way can read and change all. On
    /// loopback addresses only.
    #[must_use]
    pub fn plaintext_on_loopback() -> Self {
        Self { keys: Vec::new(), beyond_loopback: false }
    }

    /// Plaintext on other addresses, too.
    #[must_use]
    pub fn and_beyond_loopback(mut self) -> Self {
        self.beyond_loopback = true;
        self
    }

    pub(super) fn keys(&self) -> &[Key] {
        &self.keys
    }

    fn check(&self) -> Result<()> {
        if self.keys.len() > Self::MAX_KEYS {
            return Err(Error::config("control", format!("{} keys", self.keys.len()))
                .with_context("limit", Self::MAX_KEYS)
                .with_remedy("drop those that no engine uses any more"));
        }
        Ok(())
    }

    /// Whether one may listen at or dial this address.
    pub(super) fn admit(&self, address: &Address, loopback: bool) -> Result<()> {
        if !self.keys.is_empty() || self.beyond_loopback || loopback {
            return Ok(());
        }
        let place = super::place(address);
        Err(Error::config("control", format!("plaintext beyond loopback, at {place}"))
            .with_remedy("give all engines a key, or allow plaintext beyond loopback by name"))
    }
}

/// Whom one may dial.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Allowed {
    /// A host, at any port.
    Host(Host),
    /// One address.
    Address(Address),
}

/// How much of everything there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of a message: 2 MiB, twice the largest card.
    pub message_bytes: usize,
    /// Sessions, dialled and accepted: 4096. Each takes a file descriptor.
    pub sessions: usize,
    /// Accepted connections that have not proven the key: 1024. One more, and the oldest is dropped; of those that have said
    /// nothing valid yet, if there are any.
    pub half_open: usize,
    /// For proving the key, and for a dial from its call on: 5 s.
    pub half_open_for: Duration,
    /// Accepted handshakes a second, over which the others wait: 2000.
    pub handshakes_per_second: u32,
    /// Bytes of messages that wait to be sent in one session: 4 MiB. A single longer message waits all the same.
    pub queue_bytes: usize,
    /// Bytes that came in one session and were not polled, over which no more of it is read: 4 MiB.
    pub inbox_bytes: usize,
    /// Events of all sessions that were not polled, over which nothing more is read: 65,536.
    pub events: usize,
    /// How long a session that was closed on this side may go on to send what it has: 1 s.
    pub linger: Duration,
    /// Silence of the other side after which it is asked whether it is there, and of this side after which it says that it is:
    /// 5 s. The two sides may differ in it by less than the pings that may be missed.
    pub ping_after: Duration,
    /// So many unanswered pings in a row, and it is taken to be gone: 3.
    pub missed_pings: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            message_bytes: 2 << 20,
            sessions: 4096,
            half_open: 1024,
            half_open_for: Duration::from_secs(5),
            handshakes_per_second: 2000,
            queue_bytes: 4 << 20,
            inbox_bytes: 4 << 20,
            events: 65_536,
            linger: Duration::from_secs(1),
            ping_after: Duration::from_secs(5),
            missed_pings: 3,
        }
    }
}

impl Limits {
    fn check(&self) -> Result<()> {
        let zero = [
            ("message_bytes", self.message_bytes == 0),
            ("sessions", self.sessions == 0),
            ("half_open", self.half_open == 0),
            ("half_open_for", self.half_open_for.is_zero()),
            ("handshakes_per_second", self.handshakes_per_second == 0),
            ("queue_bytes", self.queue_bytes == 0),
            ("inbox_bytes", self.inbox_bytes == 0),
            ("events", self.events == 0),
            ("ping_after", self.ping_after.is_zero()),
            ("missed_pings", self.missed_pings == 0),
        ];
        match zero.iter().find(|(_, zero)| *zero) {
            Some((name, _)) => Err(Error::config("control", format!("the limit {name} is 0"))),
            None => Ok(()),
        }
    }
}

/// What [`Control::start`](super::Control::start) wants to know.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ControlConfig {
    /// Who this side is.
    pub identity: RemoteIdentity,
    /// A key, or none.
    pub security: Security,
    /// Whom this side may dial; `None` for everybody if there is a key, and for nobody if there is none.
    pub allowed: Option<BTreeSet<Allowed>>,
    /// What its messages speak.
    pub versions: Versions,
    /// How much of everything there may be.
    pub limits: Limits,
}

impl ControlConfig {
    /// With the usual limits.
    #[must_use]
    pub fn new(identity: RemoteIdentity, security: Security) -> Self {
        Self {
            identity,
            security,
            allowed: None,
            versions: Versions::CURRENT,
            limits: Limits::default(),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        self.security.check()?;
        self.limits.check()?;
        if !self.versions.known.contains(self.versions.required) {
            return Err(Error::misuse(
                "control",
                "this side requires features that it does not know",
            )
            .with_context("required", self.versions.required)
            .with_context("known", self.versions.known));
        }
        Ok(())
    }

    /// Whether this address may be dialled, as far as one can say before it is resolved.
    pub(super) fn admit(&self, address: &Address) -> Result<()> {
        let unspecified = match address.host() {
            Host::V4(ip) => ip.is_unspecified(),
            Host::V6(ip) => ip.is_unspecified(),
            _ => false,
        };
        if unspecified || address.port() == 0 {
            return Err(Error::config("control", format!("nobody can be reached at {address}"))
                .with_remedy("dial the address and port that the peer publishes"));
        }
        let refuse = |why: &str| {
            Err(Error::config("control", format!("{address} may not be dialled: {why}")))
        };
        match &self.allowed {
            None if self.security.keys().is_empty() => {
                return refuse("without a key only listed addresses may be").map_err(
                    |error: Error| error.with_remedy("list it, or give all engines a key"),
                );
            }
            Some(list)
                if !list.contains(&Allowed::Address(address.clone()))
                    && !list.contains(&Allowed::Host(address.host().clone())) =>
            {
                return refuse("it is not on the list of allowed addresses").map_err(
                    |error: Error| error.with_remedy("add it to the list, if it should be"),
                );
            }
            _ => {}
        }
        // A name is looked up first.
        let loopback = matches!(address.host(), Host::Name(_)) || address.is_loopback();
        self.security.admit(address, loopback)
    }
}
