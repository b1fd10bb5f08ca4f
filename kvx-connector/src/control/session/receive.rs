//! Items out of a stream of bytes, however it was cut.

use kvx_core::Error;

use super::cipher::NOISE_BYTES;
use super::fault::wrong_key;
use super::preamble::{PREAMBLE_BYTES, begins_well};
use super::{Fault, FaultKind, Session, SessionEvent, State};
use crate::control::hello;
use crate::control::record::{LENGTH_BYTES, TAG_BYTES};

impl Session {
    /// Takes bytes of the stream, however it was cut. What comes of them is appended to `events`, also where a fault follows.
    ///
    /// # Errors
    ///
    /// The session is over. Nothing that is given to it later is looked at.
    pub fn receive(
        &mut self,
        mut bytes: &[u8],
        events: &mut Vec<SessionEvent>,
    ) -> Result<(), Fault> {
        let mut held = std::mem::take(&mut self.input);
        if !held.is_empty() {
            // Completes one item; the rest is taken from where it lies.
            let wanted = self.wanted(&held);
            if wanted <= LENGTH_BYTES + NOISE_BYTES {
                // A stranger is given no more than he fills.
                held.reserve_exact(LENGTH_BYTES + NOISE_BYTES - held.len());
            }
            let (more, rest) = bytes.split_at(wanted.saturating_sub(held.len()).min(bytes.len()));
            held.extend_from_slice(more);
            bytes = rest;
            if held.len() < self.wanted(&held) {
                // The length is known only now.
                let (more, rest) =
                    bytes.split_at((self.wanted(&held) - held.len()).min(bytes.len()));
                held.extend_from_slice(more);
                bytes = rest;
            }
            if held.len() < self.wanted(&held) {
                self.input = held;
                return self.check_input();
            }
            self.step_or_end(&held, events)?;
        }
        loop {
            if matches!(self.state, State::Over) {
                return Ok(());
            }
            if bytes.is_empty() {
                return Ok(());
            }
            if matches!(self.state, State::Knocked(_)) {
                return Err(self.end(Fault {
                    kind: FaultKind::WrongKey,
                    error: Error::peer("control", "it goes on before it was answered"),
                }));
            }
            let wanted = self.wanted(bytes);
            let Some((item, rest)) = bytes.split_at_checked(wanted) else {
                self.input = bytes.to_vec();
                return self.check_input();
            };
            self.step_or_end(item, events)?;
            bytes = rest;
        }
    }

    /// Refuses what is incomplete as soon as it is known to be wrong, so that nobody waits for the rest or keeps it.
    fn check_input(&mut self) -> Result<(), Fault> {
        let held = std::mem::take(&mut self.input);
        let result = match &self.state {
            State::Preamble => begins_well(&held).map(|_| ()),
            _ => match held.first_chunk::<LENGTH_BYTES>() {
                None => Ok(()),
                Some(length) => self.check_length(u16::from_le_bytes(*length).into()),
            },
        };
        self.input = held;
        result.map_err(|fault| self.end(fault))
    }

    /// How many bytes the next item has, as far as its beginning tells.
    fn wanted(&self, begins: &[u8]) -> usize {
        match self.state {
            State::Preamble => PREAMBLE_BYTES,
            _ => match begins.first_chunk::<LENGTH_BYTES>() {
                Some(length) => LENGTH_BYTES + usize::from(u16::from_le_bytes(*length)),
                None => LENGTH_BYTES,
            },
        }
    }

    pub(super) fn check_length(&self, bytes: usize) -> Result<(), Fault> {
        match &self.state {
            State::First(_) | State::Second(_) if bytes != NOISE_BYTES => {
                Err(wrong_key(self.dials))
            }
            State::Hello(cipher) => {
                let tag = if cipher.noise.is_some() { TAG_BYTES } else { 0 };
                if bytes > hello::MAX_BYTES + 1 + tag {
                    return Err(Fault::bad(format!("a hello of {bytes} bytes")));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
