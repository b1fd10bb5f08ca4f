//! Whom this side turns away, and being turned away.

use std::os::fd::OwnedFd;

use kvx_core::id::PeerId;
use kvx_core::{Error, ErrorKind, Result, limit_remedy};

use crate::ending::Why;
use crate::engine::{Shared, socket_name};
use crate::error::BACKEND;
use crate::message::{Message, Refused, Turned};
use crate::state::State;
use crate::sys::socket;

/// What the one who is turned away says of it.
impl From<Turned> for Why {
    fn from(why: Turned) -> Self {
        match why {
            Turned::User(user) => Self {
                kind: ErrorKind::Config,
                text: format!("this side runs as a user that may not connect (user={user})").into(),
                remedy: Some("run both as one user, or set the peer's option users".into()),
                system: None,
            },
            Turned::System(number) => {
                let error = std::io::Error::from_raw_os_error(number);
                let remedy = limit_remedy(number).map(|remedy| format!("at the peer: {remedy}"));
                Self {
                    kind: ErrorKind::Resources,
                    text: format!("the peer cannot have what the connection takes: {error}").into(),
                    remedy: remedy.map(Into::into),
                    system: None,
                }
            }
        }
    }
}

impl Shared {
    /// Tells a process why it is not let in. One that does not listen sees that nobody comes.
    pub(crate) fn turn_away(&self, socket: &OwnedFd, to: [u8; 16], word: u64, why: Turned) {
        let refused = Message::Refused(Refused { from: self.incarnation, to, word, why });
        let _unheard = socket::send(socket, &refused.encode(), &[]);
    }

    /// Tells a peer that this side's system does not give it what the connection takes: by what there is of the connection,
    /// else by one that is made for it, with the descriptor that is kept for those who are to be told.
    pub(crate) fn tell(&self, state: &mut State, peer: PeerId, number: i32) {
        let Some(known) = state.peers.get(peer) else { return };
        let Some(word) = known.their_word else { return };
        let (to, why) = (known.incarnation, Turned::System(number));
        let link = known.link.as_ref().map(|link| &link.socket);
        let there = link.or_else(|| known.dialing.as_ref().map(|dialing| &dialing.socket));
        if let Some(socket) = there {
            return self.turn_away(socket, to, word, why);
        }
        drop(state.spare.take());
        if let Ok(socket) = socket::dial(socket_name(&to).as_bytes()) {
            self.turn_away(&socket, to, word, why);
        }
        // Another is kept.
        self.wake();
    }

    /// A peer does not let this process in.
    pub(crate) fn turned_away(&self, state: &mut State, peer: PeerId, refused: &Refused) {
        self.end(state, peer, Some(refused.why.into()));
    }

    /// Whether the policy lets this user's processes in.
    pub(crate) fn admit(&self, user: u32) -> Result<()> {
        let mine = rustix::process::geteuid().as_raw();
        if self.options.users.admit(mine, user) {
            return Ok(());
        }
        Err(Error::config("connect", "the peer runs as a user that may not connect")
            .with_backend(BACKEND)
            .with_context("user", user)
            .with_context("this_user", mine)
            .with_context("users", self.options.users)
            .with_remedy("run both as one user, or set the option users"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_is_turned_away_is_told_what_to_do_and_where() {
        let full = Why::from(Turned::System(libc::EMFILE)).error("connection");
        assert_eq!(full.kind(), ErrorKind::Resources);
        let said = full.to_string();
        assert!(said.contains("the peer cannot") && said.contains("at the peer: "), "{said}");
        assert!(said.contains("ulimit -n"), "{said}");
        let user = Why::from(Turned::User(7)).error("connection");
        assert_eq!(user.kind(), ErrorKind::Config);
        assert!(user.to_string().contains("user=7"), "{user}");
        // A number that nobody knows is said as it is.
        assert!(Why::from(Turned::System(-1)).error("connection").to_string().contains("-1"));
    }
}
