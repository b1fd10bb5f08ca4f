//! Who was given what, and what became of it.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::process::Who;
use crate::words::{Ended, How};

/// How long after its deadline a request may be over for its engine: until what it has posted is cancelled, severed, and
/// quarantined (`hasten`), and a machine that has much to do gets to it.
const BOUND: Duration = Duration::from_millis(300 + 3000 + 2000);

struct Request {
    owner: Who,
    freed: Option<Vec<String>>,
    /// Its producer was killed, or had no blocks.
    lost: bool,
}

struct Attempt {
    user: Who,
    request: u64,
    deadline: Duration,
    /// Neither side gives it up.
    wanted: bool,
    ended: Option<Ended>,
    /// It was quarantined, and is not quiet.
    kept: bool,
    lost: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) requests: u64,
    pub(crate) attempts: u64,
    pub(crate) ready: u64,
    pub(crate) failed: u64,
    pub(crate) aborted: u64,
    pub(crate) quarantined: u64,
    /// Of requests and attempts, those whose engine was killed before they were over.
    pub(crate) died: u64,
    /// For which there were no blocks.
    pub(crate) full: u64,
    /// Of producers without a fault, with a consumer without one: attempts that were ready, and others, of those that neither
    /// side gave up.
    pub(crate) others: (u64, u64),
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.attempts += other.attempts;
        self.ready += other.ready;
        self.failed += other.failed;
        self.aborted += other.aborted;
        self.quarantined += other.quarantined;
        self.died += other.died;
        self.full += other.full;
        self.others.0 += other.others.0;
        self.others.1 += other.others.1;
    }
}

#[derive(Default)]
pub(crate) struct Ledger {
    requests: BTreeMap<u64, Request>,
    attempts: BTreeMap<u64, Attempt>,
    pub(crate) tally: Tally,
    /// What must not be.
    pub(crate) wrong: Vec<String>,
}

impl Ledger {
    pub(crate) fn published(&mut self, request: u64, owner: Who) {
        self.tally.requests += 1;
        self.requests.insert(request, Request { owner, freed: None, lost: false });
    }

    pub(crate) fn fetched(
        &mut self,
        (attempt, request): (u64, u64),
        user: Who,
        deadline: Duration,
        wanted: bool,
    ) {
        self.tally.attempts += 1;
        let (ended, kept, lost) = (None, false, false);
        let entry = Attempt { user, request, deadline, wanted, ended, kept, lost };
        self.attempts.insert(attempt, entry);
    }

    /// An engine has no blocks for it: requests and attempts have no number in common.
    pub(crate) fn full(&mut self, number: u64) {
        self.tally.full += 1;
        self.requests.get_mut(&number).into_iter().for_each(|it| it.lost = true);
        self.attempts.get_mut(&number).into_iter().for_each(|it| it.lost = true);
    }

    pub(crate) fn freed(&mut self, request: u64, whys: Vec<String>) {
        let Some(entry) = self.requests.get_mut(&request) else {
            return self.wrong.push(format!("{request}: freed, and never granted"));
        };
        if let Some(before) = entry.freed.replace(whys) {
            self.wrong.push(format!("{request}: freed twice, first because {before:?}"));
        }
    }

    /// `still`: how long its engine stood still meanwhile, at most.
    pub(crate) fn ended(&mut self, ended: Ended, still: Duration) {
        let Some(entry) = self.attempts.get_mut(&ended.attempt) else {
            return self.wrong.push(format!("never begun: {ended:?}"));
        };
        if let Some(before) = &entry.ended {
            return self.wrong.push(format!("ended twice: {before:?}, {ended:?}"));
        }
        match ended.how {
            How::Ready => self.tally.ready += 1,
            How::Failed => self.tally.failed += 1,
            How::Aborted => self.tally.aborted += 1,
        }
        self.tally.quarantined += u64::from(ended.quarantined);
        if ended.wrong > 0 {
            self.wrong.push(format!("ready and wrong: {ended:?}"));
        }
        if ended.outside > 0 {
            self.wrong.push(format!("written where nothing was asked for: {ended:?}"));
        }
        if !ended.all_named {
            self.wrong.push(format!("not the blocks that were asked for are named: {ended:?}"));
        }
        let bound = entry.deadline + BOUND + still;
        if Duration::from_millis(ended.elapsed_ms) > bound {
            self.wrong.push(format!("over after more than {bound:?}: {ended:?}"));
        }
        entry.kept = ended.quarantined;
        entry.ended = Some(ended);
    }

    pub(crate) fn quiet(&mut self, attempt: u64) {
        match self.attempts.get_mut(&attempt) {
            Some(entry) if entry.kept => entry.kept = false,
            _ => self.wrong.push(format!("{attempt}: quiet, and was not quarantined")),
        }
    }

    /// A process was killed.
    pub(crate) fn died(&mut self, who: Who) {
        let requests = self.requests.values_mut();
        for entry in requests.filter(|it| it.owner == who && it.freed.is_none() && !it.lost) {
            entry.lost = true;
            self.tally.died += 1;
        }
        let attempts = self.attempts.values_mut();
        for entry in attempts.filter(|it| it.user == who && !it.lost) {
            if entry.ended.is_none() || entry.kept {
                entry.lost = true;
                self.tally.died += 1;
            }
        }
    }

    /// What is not over.
    pub(crate) fn open(&self) -> Vec<String> {
        let requests = self.requests.iter().filter(|(_, it)| it.freed.is_none() && !it.lost);
        let requests = requests.map(|(number, it)| format!("request {number} of {:?}", it.owner));
        let attempts = self.attempts.iter();
        let attempts = attempts.filter(|(_, it)| (it.ended.is_none() || it.kept) && !it.lost);
        let attempts = attempts.map(|(number, it)| {
            let kept = if it.kept { ", quarantined" } else { "" };
            format!("attempt {number} of {:?} at request {}{kept}", it.user, it.request)
        });
        requests.chain(attempts).collect()
    }

    /// Counts how a producer served that had no fault.
    pub(crate) fn count_other(&mut self, producer: usize) {
        for attempt in self.attempts.values().filter(|it| it.wanted) {
            let owner = self.requests.get(&attempt.request).map(|it| it.owner.0);
            match attempt.ended.as_ref().filter(|_| owner == Some(producer)).map(|it| it.how) {
                Some(How::Ready) => self.tally.others.0 += 1,
                Some(_) => self.tally.others.1 += 1,
                None => {}
            }
        }
    }

    pub(crate) fn has_ended(&self, attempt: u64) -> Option<How> {
        self.attempts.get(&attempt)?.ended.as_ref().map(|ended| ended.how)
    }

    /// Compares both sides: what was ready was held until every rank that was read had heard so.
    pub(crate) fn compare(&mut self) {
        for (number, attempt) in &self.attempts {
            let ready = attempt.ended.as_ref().is_some_and(|ended| ended.how == How::Ready);
            let Some(request) = self.requests.get(&attempt.request).filter(|_| ready) else {
                continue;
            };
            if let Some(whys) = &request.freed
                && *whys != ["Done"]
            {
                self.wrong.push(format!("attempt {number} is ready, its lease ended by {whys:?}"));
            }
        }
    }
}
