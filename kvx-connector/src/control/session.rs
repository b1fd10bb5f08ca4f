//! One session between two engines, without a socket: bytes in, bytes out.
//!
//! ```text
//! dials                                     is dialled
//!   preamble, Noise 1  ──────────────────▶    Knocked: has the key, or a recording of somebody who had
//!                      ◀──────────────────  Noise 2, hello
//!   hello              ──────────────────▶    Up: nobody but the holder of the key can have sent this
//!   Up                 ◀─────────────────▶    messages, pings
//! ```
//!
//! | state | is entered | what it takes | what holds in it |
//! |---|---|---|---|
//! | `Preamble` | dialled | 12 bytes | nothing is known; at most 62 bytes are kept |
//! | `First` | preamble read | one record of 48 bytes | as before |
//! | `Knocked` | the record opens with a key of this side | nothing | no key was computed yet: the caller chooses when to [`answer`](Session::answer) |
//! | `Second` | dials | one record of 48 bytes | as `Preamble` |
//! | `Hello` | keys agreed | one record: the hello | the one who dialled knows that the other has the key; the dialled one does once a record opens |
//! | `Up` | hello read, all agreed | messages, pings, bye | both have proven the key in this very session |
//! | `Over` | after any fault, or a bye | nothing | |
//!
//! A record opens in its place only: the key of another session, another order, a second time, a changed bit, each gives the
//! same fault, and ends the session. Which keys encrypt changes every [`REKEY_EVERY`] records in each direction.

use std::sync::Arc;

use kvx_core::card::{Address, EngineName};
use kvx_core::{Error, Result};
use snow::HandshakeState;

use super::record::{LENGTH_BYTES, MAX_BYTES, Tag};
use super::{Agreed, Leave, RemoteIdentity, Security, Versions, hello, record};

mod begin;
mod cipher;
mod content;
mod fault;
mod preamble;
mod receive;
#[cfg(test)]
mod tests;

pub use fault::{Fault, FaultKind};

use cipher::{Cipher, broken, noise};
use fault::{left, wrong_key};
use preamble::PREAMBLE_BYTES;

/// After so many records in one direction, that direction's key is replaced by one that does not give the old one away.
pub const REKEY_EVERY: u64 = 1 << 16;
/// After so many records in one direction the session ends. Noise counts to 2^64, and must not begin again.
const MAX_RECORDS: u64 = 1 << 60;

/// What all sessions of one side have in common.
#[derive(Clone, Debug)]
pub struct Local {
    /// Who this side is.
    pub identity: RemoteIdentity,
    /// What it speaks.
    pub versions: Versions,
    /// Its keys, or that it has none.
    pub security: Security,
    /// Most bytes of a message that it takes or sends.
    pub max_message_bytes: usize,
}

/// What came out of the bytes that were given to [`Session::receive`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionEvent {
    /// Somebody who has the key, or has recorded somebody who had: [`answer`](Session::answer) when there is time for it.
    Knocked,
    /// Both have proven the key, and speak a common version.
    Up {
        /// Who the other side is.
        remote: RemoteIdentity,
        /// What both speak.
        agreed: Agreed,
    },
    /// A message, whole.
    Message(Vec<u8>),
    /// The answer to [`ping`](Session::ping).
    Pong(u64),
}

/// One session, without a socket. See the [module's documentation](self).
#[derive(Debug)]
pub struct Session {
    local: Arc<Local>,
    /// Whom the one who dialled wants.
    expected: Option<(EngineName, Address)>,
    dials: bool,
    state: State,
    /// The beginning of a record.
    input: Vec<u8>,
    /// The beginning of a message.
    message: Vec<u8>,
    output: Vec<u8>,
    taken: usize,
    rekey_every: u64,
    max_records: u64,
    old_key: bool,
}

enum State {
    Preamble,
    First([u8; PREAMBLE_BYTES]),
    Knocked(Box<HandshakeState>),
    Second(Box<HandshakeState>),
    Hello(Cipher),
    Up(Cipher),
    Over,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Preamble => "Preamble",
            Self::First(_) => "First",
            Self::Knocked(_) => "Knocked",
            Self::Second(_) => "Second",
            Self::Hello(_) => "Hello",
            Self::Up(_) => "Up",
            Self::Over => "Over",
        })
    }
}

impl Session {
    /// This side dials. Its first words are in [`output`](Self::output).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Resources`](kvx_core::ErrorKind::Resources): the operating system gives no random bytes.
    pub fn dial(local: &Arc<Local>, expected: Option<(EngineName, Address)>) -> Result<Self> {
        let mut session = Self::new(local, true);
        session.expected = expected;
        let preamble = preamble::write(&local.security);
        session.output.extend_from_slice(&preamble);
        match local.security.keys() {
            [] => session.greet(None)?,
            [key, ..] => {
                let mut noise = noise(key, &preamble)?.build_initiator().map_err(broken)?;
                session.write_noise(&mut noise)?;
                session.state = State::Second(Box::new(noise));
            }
        }
        Ok(session)
    }

    /// This side is dialled.
    #[must_use]
    pub fn accept(local: &Arc<Local>) -> Self {
        Self::new(local, false)
    }

    fn new(local: &Arc<Local>, dials: bool) -> Self {
        Self {
            local: Arc::clone(local),
            expected: None,
            dials,
            state: State::Preamble,
            input: Vec::new(),
            message: Vec::new(),
            output: Vec::new(),
            taken: 0,
            rekey_every: REKEY_EVERY,
            max_records: MAX_RECORDS,
            old_key: false,
        }
    }

    fn step_or_end(&mut self, item: &[u8], events: &mut Vec<SessionEvent>) -> Result<(), Fault> {
        self.step(item, events).map_err(|fault| self.end(fault))
    }

    /// One item: the preamble, or a record with its length.
    fn step(&mut self, item: &[u8], events: &mut Vec<SessionEvent>) -> Result<(), Fault> {
        if let State::Preamble = self.state {
            return self.take_preamble(item);
        }
        let record = item.get(LENGTH_BYTES..).unwrap_or_default();
        self.check_length(record.len())?;
        match std::mem::replace(&mut self.state, State::Over) {
            State::First(preamble) => self.take_first(&preamble, record, events),
            State::Second(mut noise) => {
                noise.read_message(record, &mut []).map_err(|_| wrong_key(true))?;
                let transport =
                    noise.into_transport_mode().map_err(broken).map_err(Fault::local)?;
                self.greet(Some(transport)).map_err(Fault::local)
            }
            State::Hello(mut cipher) => {
                let opened = match cipher.open(record) {
                    // Whoever was dialled learns only now whether this is more than a recording.
                    Err(fault) if !self.dials && cipher.noise.is_some() => {
                        return Err(Fault { kind: FaultKind::WrongKey, ..fault });
                    }
                    opened => opened,
                };
                // Proven: from here on the other side may be told.
                self.state = State::Up(cipher);
                let (tag, content) = opened?;
                if tag == Tag::Bye {
                    return Err(left(&content));
                }
                if tag != Tag::Hello {
                    return Err(Fault::bad("the first record is no hello"));
                }
                let (agreed, hello) = hello::read(&self.local.versions, &content)
                    .map_err(|error| Fault { kind: FaultKind::Refused, error })?;
                self.check_engine(&hello.identity)?;
                events.push(SessionEvent::Up { remote: hello.identity, agreed });
                Ok(())
            }
            State::Up(mut cipher) => {
                let opened = cipher.open(record);
                self.state = State::Up(cipher);
                let (tag, content) = opened?;
                self.take_content(tag, content, events)
            }
            state @ (State::Preamble | State::Knocked(_) | State::Over) => {
                self.state = state;
                Ok(())
            }
        }
    }

    /// Ends the session, and puts the reason into the output where the other side may know it.
    pub fn leave(&mut self, leave: Leave, reason: &str) {
        let mut state = std::mem::replace(&mut self.state, State::Over);
        self.input = Vec::new();
        self.message = Vec::new();
        // Whoever was dialled tells nothing to one who may have recorded all he said. To the one who dialled, the second
        // Noise message was proof.
        let proven = match &state {
            State::Up(_) => true,
            State::Hello(cipher) => self.dials || cipher.noise.is_none(),
            _ => false,
        };
        if let State::Hello(cipher) | State::Up(cipher) = &mut state
            && proven
            && let Ok(bye) = record::write_bye(leave, reason)
        {
            // Where that fails, the session ends without a word.
            let _ = cipher.seal(Tag::Bye, &bye, &mut self.output);
        }
    }

    fn end(&mut self, fault: Fault) -> Fault {
        match fault.kind {
            FaultKind::BadFrame => self.leave(Leave::BadFrame, fault.error.message()),
            FaultKind::Refused => {
                let reason = fault.error.to_string();
                self.leave(Leave::Refused, reason.strip_prefix("control: ").unwrap_or(&reason));
            }
            FaultKind::Local => self.leave(Leave::Closed, fault.error.message()),
            FaultKind::Left | FaultKind::NotOurs | FaultKind::WrongKey => {
                self.state = State::Over;
                self.input = Vec::new();
                self.message = Vec::new();
            }
        }
        fault
    }

    /// Bytes for the other side, the oldest first.
    #[must_use]
    pub fn output(&self) -> &[u8] {
        &self.output[self.taken..]
    }

    /// So many bytes of the [`output`](Self::output) are on their way.
    pub fn sent(&mut self, bytes: usize) {
        self.taken = (self.taken + bytes).min(self.output.len());
        if self.taken == self.output.len() {
            self.taken = 0;
            self.output.clear();
            // What one large message needed is not kept for ever.
            self.output.shrink_to(MAX_BYTES / 16);
        }
    }

    /// Whether messages can be sent.
    #[must_use]
    pub fn is_up(&self) -> bool {
        matches!(self.state, State::Up(_))
    }

    /// Whether it is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Whether the other side used a key that this side only still accepts.
    #[must_use]
    pub fn used_old_key(&self) -> bool {
        self.old_key
    }

    /// Bytes that it keeps, for tests of how much a stranger can make it keep.
    #[cfg(test)]
    fn kept(&self) -> usize {
        self.input.capacity() + self.message.capacity() + self.output.capacity()
    }
}

pub(super) fn too_long(bytes: usize, limit: usize) -> Error {
    Error::misuse("control", "the message is too long")
        .with_context("bytes", bytes)
        .with_context("limit", limit)
}
