//! Records out of contents and back, and the handshake that gives both their keys.

use kvx_core::{Error, ErrorKind, Result, Retry};
use snow::{Builder, TransportState};

use super::super::Key;
use super::super::record::{MAX_PAYLOAD_BYTES, TAG_BYTES, Tag};
use super::Fault;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Bytes of each of the two messages of that pattern: an ephemeral key and a proof.
pub(super) const NOISE_BYTES: usize = 32 + TAG_BYTES;

/// What makes records of contents, and contents of records.
pub(super) struct Cipher {
    pub(super) noise: Option<Box<TransportState>>,
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) rekey_every: u64,
    pub(super) max_records: u64,
}

impl Cipher {
    /// Appends the record that holds `payload`.
    pub(super) fn seal(&mut self, tag: Tag, payload: &[u8], out: &mut Vec<u8>) -> Result<()> {
        debug_assert!(payload.len() <= MAX_PAYLOAD_BYTES);
        if self.sent == self.max_records {
            return Err(worn_out());
        }
        let content = payload.len() + 1;
        let bytes = content + if self.noise.is_some() { TAG_BYTES } else { 0 };
        let length = u16::try_from(bytes)
            .map_err(|_| Error::new(ErrorKind::Internal, "control", "a record is too long"))?;
        out.extend_from_slice(&length.to_le_bytes());
        match &mut self.noise {
            None => {
                out.extend_from_slice(payload);
                out.push(tag as u8);
            }
            Some(noise) => {
                if self.sent > 0 && self.sent.is_multiple_of(self.rekey_every) {
                    noise.rekey_outgoing();
                }
                let mut plain = Vec::with_capacity(content);
                plain.extend_from_slice(payload);
                plain.push(tag as u8);
                let at = out.len();
                out.resize(at + bytes, 0);
                noise.write_message(&plain, &mut out[at..]).map_err(broken)?;
            }
        }
        self.sent += 1;
        Ok(())
    }

    /// What the record holds.
    pub(super) fn open(&mut self, record: &[u8]) -> Result<(Tag, Vec<u8>), Fault> {
        if self.received == self.max_records {
            return Err(Fault::local(worn_out()));
        }
        let mut content = match &mut self.noise {
            None => record.to_vec(),
            Some(noise) => {
                if self.received > 0 && self.received.is_multiple_of(self.rekey_every) {
                    noise.rekey_incoming();
                }
                let mut content = vec![0; record.len().saturating_sub(TAG_BYTES)];
                noise.read_message(record, &mut content).map_err(|_| {
                    Fault::bad("a record does not open: it was changed, or belongs elsewhere")
                })?;
                content
            }
        };
        self.received += 1;
        let byte = content.pop().ok_or_else(|| Fault::bad("a record is empty"))?;
        let tag = Tag::from_byte(byte)
            .ok_or_else(|| Fault::bad(format!("a record of the unknown kind {byte}")))?;
        Ok((tag, content))
    }
}

/// Both sides have read the same preamble, or nothing opens.
pub(super) fn noise<'a>(key: &'a Key, preamble: &'a [u8]) -> Result<Builder<'a>> {
    let parameters = PATTERN
        .parse()
        .map_err(|_| Error::new(ErrorKind::Internal, "control", "the pattern is not built in"))?;
    Builder::new(parameters)
        .prologue(preamble)
        .and_then(|it| it.psk(0, key.bytes()))
        .map_err(broken)
}

pub(super) fn broken(source: snow::Error) -> Error {
    let kind = match source {
        snow::Error::Rng => ErrorKind::Resources,
        snow::Error::Dh => ErrorKind::Peer,
        _ => ErrorKind::Internal,
    };
    Error::new(kind, "control", "the encryption failed").with_source(source)
}

fn worn_out() -> Error {
    Error::new(ErrorKind::Closed, "control", "the session has carried as many records as it may")
        .with_retry(Retry::Reconnect)
}
