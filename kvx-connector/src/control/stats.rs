//! What has happened, in numbers.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvx_core::card::Address;

use super::{Agreed, RemoteIdentity, SessionId};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// What has happened on one control channel since it was started, in numbers; the first four say what is now.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct ControlStats {
            $($(#[$doc])* pub $name: u64,)+
        }

        #[derive(Debug, Default)]
        pub(super) struct Counters {
            $(pub(super) $name: AtomicU64,)+
        }

        impl Counters {
            pub(super) fn read(&self) -> ControlStats {
                ControlStats { $($name: self.$name.load(Ordering::Relaxed),)+ }
            }
        }
    };
}

counters! {
    /// Sessions that are up now.
    up,
    /// Accepted connections that have not proven the key, and such as are about to be closed, now.
    half_open,
    /// Dials that are under way now.
    dialling,
    /// Bytes of messages that wait to be sent now, as of the last look at these numbers.
    queued_bytes,
    /// Connections that were accepted.
    accepted,
    /// Dials that were begun.
    dialled,
    /// Sessions that came up.
    established,
    /// Of those, accepted with a key that this side only still accepts.
    old_key,
    /// Half-open connections that were dropped because there were too many.
    evicted,
    /// Half-open connections and dials whose time ran out.
    timed_out,
    /// Handshakes that had to wait because of the limit per second.
    deferred,
    /// Connections that began with something else than the preamble, or wanted other security.
    not_ours,
    /// Connections and dials where the other side did not have the key.
    wrong_key,
    /// Half-open connections that the other side closed before it had proven anything.
    unproven,
    /// Sessions refused because of versions, features, or another engine than expected.
    refused,
    /// Bad frames, each of which ended its session.
    bad_frames,
    /// Sessions refused because there were too many.
    too_many,
    /// Sessions that the other side ended properly.
    left,
    /// Sessions whose connection broke.
    lost,
    /// Sessions that were ended because pings were not answered.
    silent,
    /// Pings that were not answered in time.
    missed_pings,
    /// Dials that reached nobody.
    unreachable,
    /// Messages that were put into sockets, whole.
    messages_sent,
    /// Messages that came, whole.
    messages_received,
    /// Bytes that were put into sockets.
    bytes_sent,
    /// Bytes that came from sockets.
    bytes_received,
    /// Times that [`send`](super::Control::send) said full.
    full,
    /// Times that reading stopped because nobody polled.
    paused,
    /// Times that no connection could be accepted, for want of descriptors as a rule.
    accept_failed,
}

pub(super) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

pub(super) fn one(counter: &AtomicU64) {
    add(counter, 1);
}

pub(super) fn set(counter: &AtomicU64, count: usize) {
    counter.store(count as u64, Ordering::Relaxed);
}

/// One session that is up.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionInfo {
    /// Its number.
    pub session: SessionId,
    /// Who is at the other end.
    pub remote: RemoteIdentity,
    /// What both speak.
    pub agreed: Agreed,
    /// Where the other side's connection comes from, or goes to.
    pub peer: SocketAddr,
    /// What was dialled, if this side did.
    pub dialled: Option<Address>,
    /// Since when it is up.
    pub up_for: Duration,
    /// How long nothing has come.
    pub silent_for: Duration,
    /// Pings in a row that were not answered.
    pub missed_pings: u32,
    /// How long the last answered ping took.
    pub round_trip: Option<Duration>,
    /// Bytes of messages that wait to be sent.
    pub queued_bytes: usize,
}
