//! The engine that fills caches: leases what is asked for, until it is told to end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kvx_connector::control::{ControlEvent, SessionId};
use kvx_connector::protocol::{Reason, TransferKey};
use kvx_core::card::Address;
use kvx_core::transfer::Mode;
use kvx_core::{Error, Result};

use super::door::Door;
use super::message::{Ask, FromConsumer, FromProducer, Outcome, from_bytes};
use super::report::Served;
use super::turn::Turns;
use super::{Ends, Side};
use crate::args::ServeArgs;
use crate::engine::pool::Lease;
use crate::engine::tags::Prompt;
use crate::failure::{self, Failure};
use crate::output::{self, Output};

/// How often it looks whether leases are over, while there are any.
const LOOK: Duration = Duration::from_millis(2);
/// How often it looks around, while there are none.
const IDLE: Duration = Duration::from_secs(1);
/// Most requests of a consumer of which it has not said how they came out.
const MAX_UNTOLD: usize = 1024;
/// How long it waits at its end for leases that it has taken back.
const PATIENCE: Duration = Duration::from_secs(8);

struct Producer<'a> {
    side: Side,
    door: &'a mut Door,
    /// Leased, by this side's number.
    held: BTreeMap<u64, Held>,
    sessions: BTreeMap<SessionId, String>,
    /// Leased, and its consumer has not said how that came out.
    untold: BTreeSet<(SessionId, u64)>,
    /// Requests that wait for room.
    turns: Turns<(SessionId, u64)>,
    next: u64,
    /// When it last looked for strangers.
    looked: Instant,
    served: Served,
}

/// A request that is leased.
struct Held {
    session: SessionId,
    request: u64,
    prompt: Prompt,
    lease: Lease,
}

/// Runs it; gives the exit code.
pub(super) async fn run(
    args: &ServeArgs,
    side: Side,
    listen: Address,
    out: &mut Output,
) -> Result<u8, Failure> {
    let mut ends = Ends::new()?;
    let mut door = Door::new(side.name.clone(), side.security.clone())?;
    let address = door.listen(&listen)?;
    let ranks = side.live.address().map(ToString::to_string).unwrap_or_default();
    output::note(format!("ready: requests at {address}, cards at {ranks}"));
    let served = Served::new(&side, &address, &ranks);
    let (sessions, held) = (BTreeMap::new(), BTreeMap::new());
    let (untold, next, looked) = (BTreeSet::new(), 1, Instant::now());
    let (door, turns) = (&mut door, Turns::new(MAX_UNTOLD));
    let mut producer = Producer { side, door, held, sessions, untold, turns, next, looked, served };
    let why = producer.serve(args.once, &mut ends).await?;
    producer.end().await?;
    producer.served.strangers = producer.door.strangers();
    let mut served = producer.served;
    served.untold += producer.untold.len() as u64;
    served.ended = why.to_owned();
    served.print(out)?;
    out.document(&served)?;
    Ok(if served.is_good() { failure::OK } else { failure::FAILED })
}

impl Producer<'_> {
    /// Serves until it is asked to end, or its only consumer has gone.
    async fn serve(&mut self, once: bool, ends: &mut Ends) -> Result<&'static str> {
        loop {
            let look = if self.held.is_empty() { IDLE } else { LOOK };
            tokio::select! {
                event = self.door.next() => {
                    let gone = self.hear(event?)?;
                    if gone && once {
                        return Ok("its consumer has gone");
                    }
                }
                why = ends.asked() => return Ok(why),
                () = tokio::time::sleep(look) => {}
            }
            self.free()?;
            self.look_for_strangers();
        }
    }

    /// Tells of connections that did not have the key. What an address may be told is theirs, so no more is said.
    fn look_for_strangers(&mut self) {
        if self.looked.elapsed() < IDLE {
            return;
        }
        self.looked = Instant::now();
        let strangers = self.door.strangers();
        let new = strangers - self.served.strangers;
        if new > 0 {
            self.served.strangers = strangers;
            output::note(format!(
                "{} without this key refused; both sides need the same --key",
                crate::size::of_many(new, "connection")
            ));
        }
    }

    /// Returns whether a consumer has gone.
    fn hear(&mut self, event: ControlEvent) -> Result<bool> {
        match event {
            ControlEvent::Up { session, remote, .. } => {
                let hello = FromProducer::Hello {
                    engine: self.side.name.to_string(),
                    model: self.side.model.clone(),
                    shape: self.side.shape.to_string(),
                };
                self.say(session, &hello);
                if remote.engine == self.side.name {
                    // It has been told the name, and says so itself.
                    let name = &self.side.name;
                    output::note(format!(
                        "a consumer is sent away: it is called {name}, as this producer"
                    ));
                    self.door.close(session);
                    return Ok(false);
                }
                self.sessions.insert(session, remote.engine.to_string());
                self.served.consumers += 1;
            }
            ControlEvent::Message { session, bytes } => match from_bytes(&bytes) {
                Ok(FromConsumer::Ask(ask)) => {
                    let answer = self.ask(session, ask)?;
                    self.say(session, &answer);
                }
                Ok(FromConsumer::Over { request, outcome }) => {
                    self.turns.leave(|waiting| *waiting == (session, request));
                    // Of one that was never leased there is nothing to count.
                    match outcome {
                        _ if !self.untold.remove(&(session, request)) => {}
                        Outcome::Good => self.served.good += 1,
                        Outcome::Wrong => self.served.wrong += 1,
                        Outcome::Failed => self.served.failed += 1,
                    }
                    // Others wait for the blocks; one that was confirmed is over already.
                    let of = |held: &Held| (held.session, held.request) == (session, request);
                    let its = self.held.iter().find(|(_, held)| of(held));
                    if let Some((number, _)) = its.filter(|_| outcome == Outcome::Failed) {
                        self.side.live.withdraw(*number);
                    }
                }
                Err(error) => {
                    output::note(format!("a consumer is sent away: {}", failure::line(&error)));
                    self.door.close(session);
                }
            },
            ControlEvent::Down { session, .. } => {
                let gone = self.sessions.remove(&session).is_some();
                // Nobody is left to read them.
                let left = self.held.iter().filter(|(_, held)| held.session == session);
                left.for_each(|(number, _)| self.side.live.withdraw(*number));
                let before = self.untold.len();
                self.untold.retain(|(of, _)| *of != session);
                self.turns.leave(|(of, _)| *of == session);
                self.served.untold += (before - self.untold.len()) as u64;
                return Ok(gone);
            }
        }
        Ok(false)
    }

    /// One that does not listen has its session closed.
    fn say(&self, session: SessionId, message: &FromProducer) {
        if self.door.say(session, message).is_err() {
            self.door.close(session);
        }
    }

    /// Fills and leases what is asked for.
    fn ask(&mut self, session: SessionId, ask: Ask) -> Result<FromProducer> {
        let request = ask.request;
        let refused = |why: String| Ok(FromProducer::Refused { request, why });
        let held = |held: &Held| (held.session, held.request) == (session, request);
        if self.held.values().any(held) {
            return refused("a request of this number is not over".into());
        }
        if self.untold.iter().filter(|(of, _)| *of == session).count() >= MAX_UNTOLD {
            return refused("of too many requests it was not said how they came out".into());
        }
        if ask.tokens == 0 {
            return refused("a request has one token at least".into());
        }
        if let Err(error) = self.side.room(ask.tokens) {
            return refused(failure::line(&error));
        }
        let prompt = ask.prompt();
        let (its, now) = ((session, request), Instant::now());
        let its_turn = self.turns.asks(&its, now);
        let lease = if its_turn { self.side.pool.lease(&prompt) } else { None };
        let Some(lease) = lease else {
            self.turns.waits(its, now);
            self.served.busy += 1;
            return Ok(FromProducer::Busy { request });
        };
        self.turns.leave(|waiting| *waiting == its);
        let begun = Instant::now();
        self.side.live.memories.fill(&self.side.pieces(&prompt, &lease))?;
        self.served.fill_seconds += begun.elapsed().as_secs_f64();
        let number = self.next;
        self.next += 1;
        let key = TransferKey::new(format!("{}-{number}", self.side.name))?;
        let ticket =
            self.side.live.publish(0, (number, key), ask.tokens, &lease.tables, Mode::Read)?;
        let params = ticket.to_params(&request.to_string())?.into();
        self.untold.insert((session, request));
        self.held.insert(number, Held { session, request, prompt, lease });
        self.served.requests += 1;
        Ok(FromProducer::Ticket { request, params })
    }

    /// Takes back the blocks of leases that are over.
    fn free(&mut self) -> Result<()> {
        for (number, reasons) in self.side.live.ended()? {
            let Some(held) = self.held.remove(&number) else { continue };
            self.side.pool.release(&held.prompt, held.lease);
            let why = reasons.iter().find(|why| **why != Reason::Done).unwrap_or(&Reason::Done);
            *self.served.leases.entry(why.to_string()).or_default() += 1;
        }
        Ok(())
    }

    /// Takes all leases back, and waits until their blocks are free.
    async fn end(&mut self) -> Result<()> {
        self.side.live.withdraw_all();
        let begun = Instant::now();
        while !self.held.is_empty() && begun.elapsed() < PATIENCE {
            tokio::time::sleep(LOOK).await;
            self.free()?;
        }
        match self.held.len() {
            0 => Ok(()),
            left => Err(Error::peer("serve", "leases were taken back, and are not over")
                .with_context("leases", left)),
        }
    }
}
