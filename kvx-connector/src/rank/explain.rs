//! Why requests fail, for people.

use kvx_core::{Error, ErrorKind, Retry};

use super::fetch::Fetch;
use crate::protocol::user::Why;
use crate::protocol::{Access, Reason};

/// The error of a request that failed so.
pub(super) fn explain(why: Why, fetch: &Fetch) -> Error {
    let error = |kind, retry, text: &'static str| Error::new(kind, "fetch", text).with_retry(retry);
    let error = match why {
        Why::Ended(reason) => refused(reason, fetch.order.access, false),
        Why::Stale(Some(reason)) => refused(reason, fetch.order.access, true),
        Why::Stale(None) => error(ErrorKind::Peer, Retry::Never, LATE),
        Why::PeerFailed => error(ErrorKind::Peer, Retry::Reconnect, "a rank could not be reached"),
        Why::PeerDown => {
            error(ErrorKind::Peer, Retry::Reconnect, "the connection to a rank has ended")
        }
        Why::PeerGone => error(ErrorKind::Peer, Retry::Reconnect, "a rank is gone"),
        Why::Transfer => error(ErrorKind::Fabric, Retry::Backoff, "a transfer failed"),
        Why::Stage => error(ErrorKind::Internal, Retry::Backoff, "a stage of it failed"),
        Why::Contradiction => {
            error(ErrorKind::Peer, Retry::Never, "what was published contradicts itself")
        }
        Why::Deadline => error(ErrorKind::Fabric, Retry::Backoff, "its time was over"),
    };
    error.with_context("engine", &fetch.order.engine).with_context("lease", fetch.order.lease)
}

/// Why its lease ended, or was refused, where that is why a request failed.
pub(super) const fn reason(why: Why) -> Option<Reason> {
    match why {
        Why::Ended(reason) => Some(reason),
        Why::Stale(reason) => reason,
        _ => None,
    }
}

const LATE: &str =
    "the lease ended before the last byte had arrived: what was read may be anything";

/// The owner does not let a lease be used, or, `late`, does not confirm what was moved.
fn refused(reason: Reason, access: Access, late: bool) -> Error {
    let (done, does) = match access {
        Access::Read => ("read", "reads"),
        Access::Write => ("written", "writes"),
    };
    let text = match reason {
        Reason::Done => format!("the lease is used up: another attempt has {done} all of it"),
        Reason::Released => "the lease is given back: whoever used it before gave it up".into(),
        Reason::Expired => "the lease has expired: nobody held it in time".into(),
        Reason::Aborted => "the lease was withdrawn: its engine aborted the request".into(),
        Reason::Preempted => "the lease was withdrawn: its engine preempted the request".into(),
        Reason::Failed => "the lease was withdrawn: its engine failed the request".into(),
        Reason::Stage => "the lease was withdrawn: a stage failed at its engine".into(),
        Reason::OtherLife => "the lease is of an earlier life of its engine".into(),
        Reason::Unknown => {
            "the lease is not known to its engine: never granted, or over for long".into()
        }
        Reason::Access => format!("the lease is not to be {done}, and this side {does}"),
        Reason::Ticket => {
            "the ticket is not as its engine gave it: it names other blocks, tokens or parts than are leased".into()
        }
        Reason::Full => "the engine has no room for the lease, or for another attempt".into(),
        Reason::Empty | Reason::Contradiction | Reason::Revoked | Reason::Other => {
            format!("the lease cannot be used: {reason}")
        }
    };
    let remedy = match reason {
        Reason::Done | Reason::Released => "ask for another ticket: each is for one fetch or store",
        Reason::Expired => {
            "use tickets sooner, or give leases a longer time to live at the engine that grants them"
        }
        Reason::Aborted
        | Reason::Preempted
        | Reason::Failed
        | Reason::Stage
        | Reason::OtherLife
        | Reason::Unknown => "have the request computed again, and use the new ticket",
        Reason::Access => "fetch what was published, store into what was invited",
        Reason::Ticket => {
            "find what changes tickets on their way: a router may change addresses, and nothing else of them"
        }
        Reason::Full => "try again later, or allow more leases and attempts there",
        Reason::Empty | Reason::Contradiction | Reason::Revoked | Reason::Other => "",
    };
    let text = match (late, access) {
        (false, _) => text,
        (true, Access::Read) => format!("{text}; what was read may be anything"),
        (true, Access::Write) => format!("{text}; what was written does not count"),
    };
    let error = Error::peer("fetch", text).with_retry(Retry::Never);
    if remedy.is_empty() { error } else { error.with_remedy(remedy) }
}
