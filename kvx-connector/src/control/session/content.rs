//! What a session carries once it is up.

use kvx_core::{Error, Result};

use super::fault::left;
use super::{Fault, Session, SessionEvent, State, too_long};
use crate::control::record::{MAX_PAYLOAD_BYTES, Tag};

impl Session {
    pub(super) fn take_content(
        &mut self,
        tag: Tag,
        content: Vec<u8>,
        events: &mut Vec<SessionEvent>,
    ) -> Result<(), Fault> {
        match tag {
            Tag::Part | Tag::Message => {
                let bytes = self.message.len() + content.len();
                if bytes > self.local.max_message_bytes {
                    return Err(Fault::bad(format!(
                        "a message of over {bytes} bytes; the limit is {}",
                        self.local.max_message_bytes
                    )));
                }
                if tag == Tag::Part {
                    // Else one could send parts for ever without ever reaching a limit.
                    if content.len() != MAX_PAYLOAD_BYTES {
                        return Err(Fault::bad(format!("a part of {} bytes", content.len())));
                    }
                    self.message.extend_from_slice(&content);
                } else if self.message.is_empty() {
                    events.push(SessionEvent::Message(content));
                } else {
                    let mut message = std::mem::take(&mut self.message);
                    message.extend_from_slice(&content);
                    events.push(SessionEvent::Message(message));
                }
                Ok(())
            }
            Tag::Ping if content.len() == 8 => self.seal(Tag::Pong, &content).map_err(Fault::local),
            Tag::Pong => match content.as_slice().try_into() {
                Ok(token) => {
                    events.push(SessionEvent::Pong(u64::from_le_bytes(token)));
                    Ok(())
                }
                Err(_) => Err(Fault::bad(format!("a pong of {} bytes", content.len()))),
            },
            Tag::Ping => Err(Fault::bad(format!("a ping of {} bytes", content.len()))),
            Tag::Bye => Err(left(&content)),
            Tag::Hello => Err(Fault::bad("a second hello")),
        }
    }

    fn seal(&mut self, tag: Tag, payload: &[u8]) -> Result<()> {
        match &mut self.state {
            State::Up(cipher) => cipher.seal(tag, payload, &mut self.output),
            _ => Err(Error::misuse("control", "the session is not up")),
        }
    }

    /// Puts a message into the output.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): the session is not up, or the message is too long.
    /// [`ErrorKind::Closed`](kvx_core::ErrorKind::Closed): the session has carried all that it may.
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        if message.len() > self.local.max_message_bytes {
            return Err(too_long(message.len(), self.local.max_message_bytes));
        }
        let mut rest = message;
        while let Some((part, others)) = rest.split_at_checked(MAX_PAYLOAD_BYTES)
            && !others.is_empty()
        {
            self.seal(Tag::Part, part)?;
            rest = others;
        }
        self.seal(Tag::Message, rest)
    }

    /// Puts a ping into the output; [`SessionEvent::Pong`] with this number is its answer.
    ///
    /// # Errors
    ///
    /// As for [`send`](Self::send).
    pub fn ping(&mut self, token: u64) -> Result<()> {
        self.seal(Tag::Ping, &token.to_le_bytes())
    }
}
