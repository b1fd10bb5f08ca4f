//! What peers say over their sockets, and that they have gone.

use std::sync::Arc;

use kvx_core::id::PeerId;

use crate::ending::Why;
use crate::engine::Shared;
use crate::error::{BACKEND, system};
use crate::greet::Call;
use crate::link::{Seen, Theirs};
use crate::mail::inside;
use crate::message::{Answer, Message, Turned};
use crate::state::{Dialing, Phase, Place, State};
use crate::sys::memfd::Foreign;
use crate::sys::socket::{self, Filled};

/// Most pieces of memory of one peer that are mapped here.
const MOST_SEGMENTS: usize = 1 << 14;
/// Most messages that wait for room in the socket of a peer that asks for more.
const MOST_UNSENT: usize = 1 << 17;

impl Shared {
    /// Takes what a peer has sent over the socket.
    pub(crate) fn hear(&self, state: &mut State, peer: PeerId, token: u64) {
        // More than an honest peer ever sends at once: one that does not stop must not hold this thread.
        for _ in 0..2 * MOST_SEGMENTS {
            let Some(known) = state.peers.get_mut(peer).filter(|known| known.phase == Phase::Open)
            else {
                return;
            };
            let dialing = known.dialing.as_ref();
            let socket = match (&known.link, dialing) {
                (Some(link), _) => &link.socket,
                (None, Some(dialing)) if dialing.token == token => &dialing.socket,
                _ => return,
            };
            let filled = known.inbox.fill(socket);
            while let Some(known) = state.peers.get_mut(peer)
                && let Some(frame) = known.inbox.next()
            {
                if let Err(why) = self.told(state, peer, &frame) {
                    return self.bury(state, peer, why);
                }
            }
            match filled {
                Ok(Filled::More) => {}
                Ok(Filled::Empty) => return,
                Ok(Filled::Over) => {
                    return self.hung_up(state, peer, "the peer has ended the connection");
                }
                Err(error) => {
                    let why = format!("the connection is broken: {error}");
                    return self.hung_up(state, peer, why);
                }
            }
        }
    }

    /// The other side has hung up.
    fn hung_up(&self, state: &mut State, peer: PeerId, why: impl Into<Why>) {
        let Some(known) = state.peers.get_mut(peer) else { return };
        if known.link.is_none()
            && let Some(dialing) = known.dialing.take()
        {
            self.watch_no_more(&dialing.socket);
            // Both may have dialled, and the peer's call counts: it is on its way.
            if known.incarnation < self.incarnation {
                return;
            }
            return self.end(state, peer, Some("the peer refused the connection".into()));
        }
        self.bury(state, peer, why.into());
    }

    /// A peer is gone: what it said before is heard, then the connection ends.
    pub(crate) fn bury(&self, state: &mut State, peer: PeerId, why: Why) {
        let mut record = Vec::new();
        if state.peers.get(peer).is_some_and(|known| known.link.is_some()) {
            self.take_mail(state, peer, &mut record, false);
            self.signal(state);
        }
        self.end(state, peer, Some(why));
    }

    /// One message of a peer's.
    fn told(
        &self,
        state: &mut State,
        peer: PeerId,
        frame: &[u8; socket::FRAME],
    ) -> Result<(), Why> {
        let broken = |why: &str| Why::from(format!("the peer broke the protocol: {why}"));
        let message =
            Message::decode(frame).ok_or_else(|| broken("a message that makes no sense"))?;
        let Some(known) = state.peers.get_mut(peer) else { return Ok(()) };
        let mut carried = Vec::new();
        for _ in 0..message.descriptors() {
            let Some(descriptor) = known.inbox.descriptor() else {
                return Err(match known.inbox.cut() {
                    Some(error) => {
                        let what = "a descriptor that the peer has sent cannot be taken";
                        (&system("connection", what, error)).into()
                    }
                    None => broken("a message without its descriptor"),
                });
            };
            carried.push(descriptor);
        }
        match message {
            Message::Hello(hello) => {
                let dialing = known.dialing.take().ok_or_else(|| broken("a second greeting"))?;
                let Dialing { socket, mine, process, token } = dialing;
                let right = hello.from == known.incarnation
                    && hello.to == self.incarnation
                    && hello.word == known.word
                    && Some(hello.own_word) == known.their_word;
                let inbox = std::mem::take(&mut known.inbox);
                let (Ok(theirs), true) = (Theirs::try_from(carried), right) else {
                    return Err(broken("the greeting of somebody else"));
                };
                let who = match socket::peer(&socket) {
                    Ok(who) => who,
                    Err(error) => {
                        let what = "it cannot be seen who the peer is";
                        return Err((&system("connection", what, error)).into());
                    }
                };
                let theirs = Seen::new(theirs, who.is_of_this_user())?;
                let call = Call { socket, inbox, who, mine, theirs, process };
                return self.linked(state, peer, call, Some(token), &hello);
            }
            Message::Refused(refused) => {
                let right = refused.from == known.incarnation
                    && refused.to == self.incarnation
                    && refused.word == known.word;
                // What a connection takes may be missing once the other side has it.
                let early = known.link.is_none() || matches!(refused.why, Turned::System(_));
                if !right || !early {
                    return Err(broken("a refusal of somebody else"));
                }
                return Err(refused.why.into());
            }
            Message::Bell => {}
            Message::Locate { token, slot, generation, secret } => {
                let region = kvx_core::id::RegionId::new(slot, generation);
                let registered = state.regions.get(region).filter(|r| r.secret == secret);
                let (answer, segment) = match registered {
                    None => (Answer::Nowhere, None),
                    Some(registered) => {
                        let bytes = registered.region.bytes();
                        match &registered.shared {
                            Some((segment, base)) => (
                                Answer::Shared { segment: segment.number, base: *base, bytes },
                                Some(Arc::clone(segment)),
                            ),
                            None => {
                                let address = registered.region.address().addr().get() as u64;
                                (Answer::Borrowed { address, bytes }, None)
                            }
                        }
                    }
                };
                if known.unsent.len() >= MOST_UNSENT {
                    return Err(broken(&format!("{MOST_UNSENT} questions without hearing the answers")));
                }
                if let Some(segment) = &segment {
                    known.send_segment(segment);
                }
                known.unsent.push_back((Message::Located { token, answer }, None));
                self.flush(state, peer);
            }
            Message::Located { token, answer } => {
                let asked = known.locating.remove(&token);
                let asked = asked.ok_or_else(|| broken("an answer to no question"))?;
                let place = match answer {
                    Answer::Nowhere => Err("the peer has no such region (any more)".into()),
                    Answer::Shared { segment, base, bytes } => {
                        match known.foreign.get(&segment) {
                            Some(memory) if bytes == asked.bytes => {
                                inside(memory, base, bytes)
                                    .then(|| Place::Shared(Arc::clone(memory), base))
                                    .ok_or_else(|| "the peer's region is outside its memory".into())
                            }
                            Some(_) => Err("the peer's region and its key differ in size".into()),
                            None => Err("the peer's memory was not sent, or not taken".into()),
                        }
                    }
                    Answer::Borrowed { address, bytes } => {
                        if bytes != asked.bytes {
                            Err("the peer's region and its key differ in size".into())
                        } else if address.checked_add(bytes).is_none() {
                            Err("the peer's region wraps around".into())
                        } else {
                            // Where it may not be read, transfers that need it say so, and what to do.
                            Ok(Place::Process(address))
                        }
                    }
                };
                // Asked once, answered once.
                let _ = asked.place.set(place);
                state.kick(peer);
            }
            Message::Segment { segment } => {
                if known.foreign.len() >= MOST_SEGMENTS {
                    return Err(broken(&format!("more than {MOST_SEGMENTS} pieces of memory")));
                }
                for descriptor in &carried {
                    match Foreign::map(descriptor) {
                        Ok(memory) => drop(known.foreign.insert(segment, Arc::new(memory))),
                        // Transfers that need it will say so.
                        Err(why) => {
                            tracing::warn!(backend = BACKEND, why, "a peer's memory is not taken");
                        }
                    }
                }
            }
            Message::Forget { segment } => drop(known.foreign.remove(&segment)),
        }
        Ok(())
    }
}
