//! What is under way, and what it waits for: its time, its turn, an open way, or a rule.

use std::sync::Arc;

use crate::engine::{Life, PeerState, Stage, Wait};
use crate::net::Net;
use crate::rule::{Kind, Operation, Party, Verdict};
use crate::schedule::{Happening, Lane};
use crate::timing::{Nanos, nanos};
use crate::trace::What;

/// What is to be done with something that has come up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Judged {
    /// It happens now.
    Now,
    /// It comes up again.
    Later,
    /// It is lost for good.
    Lost,
    /// It fails.
    Failed(kvx_core::ErrorKind),
}

impl Net {
    /// Whether nothing passes between the engines of two names.
    pub(crate) fn is_cut(&self, one: &Arc<str>, other: &Arc<str>) -> bool {
        !self.cuts.is_empty() && self.cuts.contains_key(&pair(one, other))
    }

    /// Whether what a side posted cannot go on now.
    pub(crate) fn is_blocked(&self, lane: Lane) -> bool {
        let Some(entry) = self.engines.get(&lane.engine) else { return true };
        let Some(side) = entry.peers.get(lane.peer) else { return true };
        if side.broken || self.is_cut(&entry.name, &side.name) {
            return true;
        }
        match self.engines.get(&side.engine) {
            Some(target) if target.life == Life::Up => {
                entry.preset.is_software() && (entry.stopped || target.stopped)
            }
            _ => true,
        }
    }

    /// Whether the news that the connection is over cannot reach a side.
    fn is_deaf(&self, lane: Lane) -> bool {
        self.engines.get(&lane.engine).is_none_or(|entry| {
            entry.peers.get(lane.peer).is_none_or(|side| self.is_cut(&entry.name, &side.name))
        })
    }

    /// What something waits for that is to happen after a delay.
    pub(crate) fn wait(&mut self, delay: Nanos, what: Happening) -> Wait {
        let stuck = match what {
            Happening::Notice(lane) => self.is_deaf(lane),
            Happening::Data(lane, _)
            | Happening::Completion(lane, _)
            | Happening::Note(lane, _) => self.is_blocked(lane),
            _ => false,
        };
        if stuck { Wait::Way } else { Wait::Time(self.schedule.after(delay, what)) }
    }

    pub(crate) fn unschedule(&mut self, wait: Wait) {
        if let Wait::Time(key) = wait {
            self.schedule.remove(key);
        }
    }

    /// Everything of a lane that is under way.
    fn under_way(&self, lane: Lane) -> Vec<(Happening, Wait)> {
        let Some(side) = self.side(lane) else { return Vec::new() };
        let transfers = side.transfers.iter().map(|(number, transfer)| {
            let what = match transfer.stage {
                Stage::Over(_) => Happening::Completion(lane, *number),
                Stage::Data | Stage::Room => Happening::Data(lane, *number),
            };
            (what, transfer.wait)
        });
        let notes =
            side.notes.iter().map(|(number, note)| (Happening::Note(lane, *number), note.wait));
        let notice = side.notice.map(|(wait, _)| (Happening::Notice(lane), wait));
        transfers.chain(notes).chain(notice).collect()
    }

    pub(crate) fn set_wait(&mut self, what: Happening, wait: Wait) {
        let place = match what {
            Happening::Data(lane, number) | Happening::Completion(lane, number) => {
                self.transfer_mut(lane, number).map(|transfer| &mut transfer.wait)
            }
            Happening::Note(lane, number) => self
                .side_mut(lane)
                .and_then(|side| side.notes.get_mut(&number))
                .map(|note| &mut note.wait),
            Happening::Notice(lane) => {
                self.side_mut(lane).and_then(|side| side.notice.as_mut()).map(|(wait, _)| wait)
            }
            _ => None,
        };
        if let Some(place) = place {
            *place = wait;
        }
    }

    /// Takes out of the schedule what can no longer get through, after something was closed.
    pub(crate) fn park(&mut self) {
        for lane in self.lanes() {
            let (blocked, deaf) = (self.is_blocked(lane), self.is_deaf(lane));
            if !blocked && !deaf {
                continue;
            }
            for (what, wait) in self.under_way(lane) {
                let stuck = if matches!(what, Happening::Notice(_)) { deaf } else { blocked };
                if stuck && let Wait::Time(_) = wait {
                    self.unschedule(wait);
                    self.set_wait(what, Wait::Way);
                }
            }
        }
    }

    /// Lets go on what can get through again, after something was opened.
    pub(crate) fn unpark(&mut self) {
        for lane in self.lanes() {
            for (what, wait) in self.under_way(lane) {
                if wait == Wait::Way {
                    let delay = self.draw(self.timing(lane.engine).latency);
                    let wait = self.wait(delay, what);
                    self.set_wait(what, wait);
                }
            }
        }
    }

    /// How many things a rule holds.
    pub(crate) fn held_by(&self, rule: u64) -> usize {
        self.held(rule).len()
    }

    /// What a rule holds, the first that it was given first.
    fn held(&self, rule: u64) -> Vec<Happening> {
        let mut held: Vec<(u64, Happening)> = Vec::new();
        for lane in self.lanes() {
            for (what, wait) in self.under_way(lane) {
                if let Wait::Rule(by, order) = wait
                    && by == rule
                {
                    held.push((order, what));
                }
            }
        }
        held.sort_by_key(|(order, _)| *order);
        held.into_iter().map(|(_, what)| what).collect()
    }

    /// Lets go of what a rule holds.
    pub(crate) fn release(&mut self, rule: u64) -> usize {
        let held = self.held(rule);
        for what in &held {
            let wait = self.wait(0, *what);
            self.set_wait(*what, wait);
        }
        held.len()
    }

    /// Asks the rules about something of a lane that has come up, and does what can be done here.
    pub(crate) fn judge(&mut self, what: Happening, lane: Lane) -> Judged {
        let Some((operation, rule)) = self.ask_about(what, lane) else { return Judged::Now };
        let (verdict, rule) = rule;
        let (kind, id) = (operation.kind, operation.id);
        match verdict {
            Verdict::Drop => return Judged::Lost,
            Verdict::Fail(kind) => return Judged::Failed(kind),
            Verdict::Double => {
                if let Some(id) = id {
                    self.record(lane.engine, What::Suppressed { kind, id });
                }
                return Judged::Now;
            }
            Verdict::Delay(by) => {
                let wait = self.wait(nanos(by), what);
                self.set_wait(what, wait);
            }
            Verdict::Hold => {
                let order = self.number();
                self.set_wait(what, Wait::Rule(rule, order));
            }
            Verdict::Reorder => match self.last_of(lane, what) {
                Some(last) => {
                    let delay = last.saturating_sub(self.schedule.now).saturating_add(1);
                    let wait = self.wait(delay, what);
                    self.set_wait(what, wait);
                }
                None => return Judged::Now,
            },
            Verdict::Pass | Verdict::Full => return Judged::Now,
        }
        Judged::Later
    }

    /// When the last of what else is scheduled of a lane comes up.
    fn last_of(&self, lane: Lane, except: Happening) -> Option<Nanos> {
        let times = self.under_way(lane).into_iter().filter_map(|(what, wait)| match wait {
            Wait::Time(key) if what != except => Some(key.at),
            _ => None,
        });
        times.max()
    }

    fn ask_about(&mut self, what: Happening, lane: Lane) -> Option<(Operation, (Verdict, u64))> {
        let side = self.side(lane)?;
        let (kind, id, mode, bytes) = match what {
            Happening::Data(_, number) => {
                let transfer = side.transfers.get(&number)?;
                (Kind::Data, transfer.id, Some(transfer.mode), transfer.work.part_bytes())
            }
            Happening::Completion(_, number) => {
                let transfer = side.transfers.get(&number)?;
                (Kind::Completion, transfer.id, Some(transfer.mode), transfer.bytes)
            }
            Happening::Note(_, number) => {
                let note = side.notes.get(&number)?;
                (Kind::Notification, note.id, None, note.payload.len() as u64)
            }
            _ => return None,
        };
        let to =
            (side.engine, Party { name: Arc::clone(&side.name), incarnation: side.incarnation });
        self.ask(kind, lane.engine, to, Some(id), mode, bytes)
    }

    /// Asks the rules about an operation, and writes down what they say. A verdict that means nothing for it is `None`.
    pub(crate) fn ask(
        &mut self,
        kind: Kind,
        engine: u64,
        to: (u64, Party),
        id: Option<kvx_core::id::TransferId>,
        mode: Option<kvx_core::transfer::Mode>,
        bytes: u64,
    ) -> Option<(Operation, (Verdict, u64))> {
        let nth = self.rules.count(kind, engine, to.0);
        if self.rules.is_empty() {
            return None;
        }
        let entry = self.engines.get(&engine)?;
        let from = Party { name: Arc::clone(&entry.name), incarnation: entry.incarnation };
        let operation = Operation { kind, from, to: to.1, id, mode, bytes, nth };
        let (verdict, rule) = self.rules.judge(&operation)?;
        let unordered = verdict != Verdict::Reorder || !self.is_ordered(engine);
        if verdict.applies_to(kind) && unordered {
            self.record(engine, What::Ruled { kind, id, verdict });
            Some((operation, (verdict, rule)))
        } else {
            self.record(engine, What::Ignored { kind, id, verdict });
            None
        }
    }

    /// Whether a side still counts on the other.
    pub(crate) fn is_open(&self, lane: Lane) -> bool {
        self.side(lane).is_some_and(|side| side.state == PeerState::Open)
    }
}

/// Two names in the order in which a partition knows them.
pub(crate) fn pair(one: &Arc<str>, other: &Arc<str>) -> (Arc<str>, Arc<str>) {
    let (first, second) = if one <= other { (one, other) } else { (other, one) };
    (Arc::clone(first), Arc::clone(second))
}
