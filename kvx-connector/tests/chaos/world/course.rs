//! The course of a replay: requests come, things go wrong, and it is good again.

use std::time::{Duration, Instant};

use super::{ATTEMPT, Act, PATIENCE, World};
use crate::fault::{CONSUMER, Fault, PRODUCER};
use crate::process::Process;
use crate::proxy::Weather;
use crate::trace::{Entry, Fate};
use crate::words::{How, Order};

/// How long a lease holds however often it is extended.
const HARD_MS: u64 = 3000;

impl World {
    /// Starts all, and moves one request from each producer.
    pub(super) fn warm(&mut self) {
        (0..self.slots.len()).for_each(|index| self.start(index));
        self.fresh("warm");
        let settled = self.settle(|_| true);
        for (slot, count) in self.slots.iter_mut().zip(settled) {
            slot.warm = Some(count);
        }
    }

    /// A request from each producer is ready, at the latest at the tenth attempt.
    fn fresh(&mut self, when: &str) {
        let until = Instant::now() + PATIENCE;
        if !self.wait(until, |world| world.slots.iter().all(|slot| slot.up)) {
            return self.ledger.wrong.push(format!("{when}: an engine has not started"));
        }
        for producer in self.producers() {
            let mut ready = false;
            while !ready && Instant::now() < until {
                let entry = Entry {
                    at: Duration::ZERO,
                    tokens: 50,
                    has: 0,
                    deadline: Duration::from_secs(5),
                    ttl: Duration::from_secs(1),
                    fate: Fate::Read,
                };
                let request = self.publish(entry, producer);
                let over = |world: &Self| world.ledger.open().is_empty();
                self.wait(until, over);
                let attempt = self.ledger.has_ended(request + ATTEMPT);
                let again = self.ledger.has_ended(request + 2 * ATTEMPT);
                ready = attempt == Some(How::Ready) || again == Some(How::Ready);
            }
            if !ready {
                self.ledger.wrong.push(format!("{when}: nothing can be read from {producer}"));
                self.ledger.wrong.extend(self.ledger.open());
            }
        }
    }

    /// Publishes a request. What follows is in the trace.
    fn publish(&mut self, entry: Entry, producer: usize) -> u64 {
        self.trace.push(entry);
        let index = self.trace.len() - 1;
        self.publish_entry(index, producer)
    }

    fn publish_entry(&mut self, index: usize, producer: usize) -> u64 {
        let entry = &self.trace[index];
        let request = index as u64 + 1;
        let slot = &self.slots[producer];
        if slot.up {
            let ttl_ms = u64::try_from(entry.ttl.as_millis()).unwrap();
            let (tokens, hard_ms) = (entry.tokens, HARD_MS);
            self.tell(producer, &Order::Publish { request, tokens, ttl_ms, hard_ms });
            self.ledger.published(request, (producer, slot.life));
        }
        request
    }

    pub(super) fn fetch(&mut self, attempt: u64, request: u64) {
        let Some(ticket) = self.tickets.get(&request).cloned() else { return };
        let entry = self.trace[usize::try_from(request).unwrap() - 1].clone();
        let slot = &self.slots[CONSUMER];
        if !slot.up {
            return;
        }
        let (from, deadline) = (entry.has, entry.deadline);
        let deadline_ms = u64::try_from(deadline.as_millis()).unwrap();
        let (user, wanted) = ((CONSUMER, slot.life), entry.fate == Fate::Read);
        self.ledger.fetched((attempt, request), user, deadline, wanted);
        self.tell(CONSUMER, &Order::Fetch { attempt, request, ticket, from, deadline_ms });
        if let Fate::Aborted(soon) = entry.fate {
            self.at(Instant::now() + soon, Act::Abort(attempt));
        }
    }

    pub(super) fn replay(&mut self, faults: &[(Duration, Fault)]) {
        let begin = Instant::now() + Duration::from_millis(10);
        for index in 0..self.trace.len() {
            // Those that warmed it are over.
            if self.trace[index].at > Duration::ZERO {
                self.at(begin + self.trace[index].at, Act::Publish(index));
            }
        }
        for (at, fault) in faults {
            self.at(begin + *at, Act::Begin(*fault));
        }
        while !self.acts.is_empty() {
            let until = self.acts.first_key_value().map(|((at, _), _)| *at).unwrap();
            self.wait(until, |_| false);
            let (_, act) = self.acts.pop_first().unwrap();
            self.act(act);
        }
    }

    pub(super) fn act(&mut self, act: Act) {
        let now = Instant::now();
        match act {
            Act::Publish(index) => {
                let producer = PRODUCER + index % self.producers().len();
                self.publish_entry(index, producer);
            }
            Act::Withdraw(request) => {
                let producers = self.producers();
                producers.for_each(|it| self.tell(it, &Order::Withdraw { request }));
            }
            Act::Abort(attempt) => self.tell(CONSUMER, &Order::Abort { attempt }),
            Act::Begin(fault) => {
                self.note(&format!("begins: {fault:?}"));
                let time = match fault {
                    Fault::Kill(index, time) => {
                        self.kill(index);
                        time
                    }
                    Fault::Stop(index, time) => {
                        self.slots[index].process.iter_mut().for_each(Process::stop);
                        time
                    }
                    Fault::Weather(weather, time) => {
                        self.proxies[PRODUCER].iter().for_each(|proxy| proxy.set(weather));
                        time
                    }
                    Fault::Drop(time) => {
                        self.filter.as_ref().unwrap().begin();
                        time
                    }
                };
                self.at(now + time, Act::End(fault));
            }
            Act::End(fault) => {
                self.note(&format!("ends: {fault:?}"));
                match fault {
                    Fault::Kill(index, _) => {
                        if self.slots[index].process.is_none() {
                            let blocks = &mut self.slots[index].setup.blocks;
                            *blocks = if *blocks == 800 { 900 } else { 800 };
                            self.start(index);
                        }
                    }
                    Fault::Stop(index, _) => {
                        if let Some(process) = &mut self.slots[index].process {
                            self.still += process.go_on();
                        }
                    }
                    Fault::Weather(..) => {
                        self.proxies[PRODUCER].iter().for_each(|proxy| proxy.set(Weather::Fair));
                    }
                    Fault::Drop(_) => self.filter.as_ref().unwrap().end(),
                }
            }
        }
    }

    /// Nothing goes wrong any more: all that is under way is over in time, and new requests are served.
    pub(super) fn recover(&mut self) {
        let over = |world: &Self| world.ledger.open().is_empty() && world.acts.is_empty();
        if !self.wait(Instant::now() + PATIENCE, over) {
            let open = self.ledger.open();
            self.ledger.wrong.push(format!("not over: {}", open.join("\n")));
            for slot in &mut self.slots {
                let status = slot.process.as_mut().and_then(Process::has_ended);
                let ended = status.map(|status| format!("{} has ended: {status}", slot.setup.name));
                self.ledger.wrong.extend(ended);
            }
            return;
        }
        self.fresh("afterwards");
    }
}
