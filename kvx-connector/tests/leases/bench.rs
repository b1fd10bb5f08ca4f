//! Small things to drive one owner or one user by hand.

use std::time::Duration;

use kvx_connector::protocol::message::{
    Confirm, Ended, Hold, PartList, Release, Released, ToOwner, ToUser, Verdict,
};
use kvx_connector::protocol::owner::{self, Grant, Owner};
use kvx_connector::protocol::user::{self, Ask, Outcome, Prove, Source, User};
use kvx_connector::protocol::{
    Access, Attempt, Fingerprint, LeaseName, Nonce, Part, Ranks, Reader, Reason, RequestNumber,
    TransferKey, TransferNumber,
};
use kvx_core::id::Incarnation;

pub(crate) const ENGINE: Incarnation = Incarnation::from_bytes([9; 16]);

pub(crate) fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(crate) fn peer(number: u8) -> Incarnation {
    Incarnation::from_bytes([number; 16])
}

pub(crate) fn lease(number: u64) -> LeaseName {
    LeaseName { owner: ENGINE, number, epoch: 0 }
}

pub(crate) fn reader(attempt: u64, rank: u16) -> Reader {
    Reader { attempt: Attempt { user: peer(200), number: attempt }, rank }
}

pub(crate) fn parts(count: u32) -> Vec<Part> {
    let part = |number| Part { number, group: None, layers: number..number + 1, tokens: 0..16 };
    (0..count).map(part).collect()
}

pub(crate) fn grant(number: u64, access: Access) -> Grant {
    Grant {
        lease: lease(number),
        key: TransferKey::new("r").unwrap(),
        access,
        fingerprint: None,
        ttl: ms(1000),
        hard: ms(60_000),
        parts: parts(1),
        total: Some(1),
        stages: 0,
    }
}

pub(crate) fn hold(number: u64, reader: Reader, set: &[u16]) -> ToOwner {
    let set = Ranks::new(set.iter().copied()).unwrap();
    let lease = lease(number);
    let (have, total, asks, access, fingerprint) = (0, false, true, None, None);
    ToOwner::Hold(Hold { lease, reader, set, have, total, asks, access, fingerprint })
}

pub(crate) fn confirm(number: u64, reader: Reader, set: &[u16], nonce: u64) -> ToOwner {
    let set = Ranks::new(set.iter().copied()).unwrap();
    let nonce = Nonce(nonce);
    let lease = lease(number);
    ToOwner::Confirm(Confirm {
        lease,
        reader,
        set,
        nonce,
        parts: 1,
        last: true,
        left_ms: 60_000,
        access: None,
        fingerprint: None,
    })
}

/// That of a reader which has moved nothing.
pub(crate) fn confirm_of_nothing(number: u64, reader: Reader, nonce: u64) -> ToOwner {
    let mut message = confirm(number, reader, &[reader.rank], nonce);
    if let ToOwner::Confirm(confirm) = &mut message {
        confirm.parts = 0;
    }
    message
}

pub(crate) fn release(number: u64, reader: Reader, set: &[u16]) -> ToOwner {
    let set = Ranks::new(set.iter().copied()).unwrap();
    let (lease, access, fingerprint) = (lease(number), None, None);
    ToOwner::Release(Release { lease, reader, set, access, fingerprint })
}

/// An owner and the time.
pub(crate) struct Own {
    pub(crate) owner: Owner,
    pub(crate) now: Duration,
}

impl Own {
    pub(crate) fn new() -> Self {
        Self::with(owner::Config::new(ENGINE))
    }

    pub(crate) fn with(config: owner::Config) -> Self {
        Self { owner: Owner::new(config), now: Duration::ZERO }
    }

    pub(crate) fn tell(&mut self, input: owner::Input) -> Vec<owner::Output> {
        let mut out = Vec::new();
        self.owner.step(self.now, input, &mut out);
        out
    }

    pub(crate) fn hear(&mut self, from: u8, message: ToOwner) -> Vec<owner::Output> {
        self.tell(owner::Input::Message { peer: peer(from), message })
    }

    /// Time passes, and the owner is told whenever it wants to be.
    pub(crate) fn pass(&mut self, millis: u64) -> Vec<owner::Output> {
        let (end, mut all) = (self.now + ms(millis), Vec::new());
        while let Some(at) = self.owner.wake().filter(|at| *at <= end) {
            self.now = at.max(self.now);
            all.extend(self.tell(owner::Input::Tick));
        }
        self.now = end;
        all.extend(self.tell(owner::Input::Tick));
        all
    }
}

/// Leases that are freed, and why they ended.
pub(crate) fn freed(out: &[owner::Output]) -> Vec<(u64, Reason)> {
    let free = |output: &owner::Output| match output {
        owner::Output::Free { lease, why } => Some((lease.number, *why)),
        _ => None,
    };
    out.iter().filter_map(free).collect()
}

/// What the verdicts say.
pub(crate) fn verdicts(out: &[owner::Output]) -> Vec<bool> {
    let held = |output: &owner::Output| match output {
        owner::Output::Send { message: ToUser::Verdict(verdict), .. } => Some(verdict.held),
        _ => None,
    };
    out.iter().filter_map(held).collect()
}

/// Why verdicts say that a lease had not held.
pub(crate) fn reasons(out: &[owner::Output]) -> Vec<Option<Reason>> {
    let why = |output: &owner::Output| match output {
        owner::Output::Send { message: ToUser::Verdict(verdict), .. } => Some(verdict.why),
        _ => None,
    };
    out.iter().filter_map(why).collect()
}

/// The same message from somebody who says what they do.
pub(crate) fn saying(access: Access, mut message: ToOwner) -> ToOwner {
    match &mut message {
        ToOwner::Hold(Hold { access: said, .. })
        | ToOwner::Confirm(Confirm { access: said, .. })
        | ToOwner::Release(Release { access: said, .. }) => *said = Some(access),
    }
    message
}

/// The same, said of blocks that this number stands for.
pub(crate) fn touching(blocks: u64, mut message: ToOwner) -> ToOwner {
    match &mut message {
        ToOwner::Hold(Hold { fingerprint: said, .. })
        | ToOwner::Confirm(Confirm { fingerprint: said, .. })
        | ToOwner::Release(Release { fingerprint: said, .. }) => *said = Some(Fingerprint(blocks)),
    }
    message
}

/// Who is told that a lease has ended, and why.
pub(crate) fn ended(out: &[owner::Output]) -> Vec<(Incarnation, Reason)> {
    let told = |output: &owner::Output| match output {
        owner::Output::Send { peer, message: ToUser::Ended(ended) } => Some((*peer, ended.reason)),
        _ => None,
    };
    out.iter().filter_map(told).collect()
}

/// A user and the time.
pub(crate) struct Use {
    pub(crate) user: User,
    pub(crate) now: Duration,
}

impl Use {
    pub(crate) fn new() -> Self {
        Self { user: User::new(user::Config::default(), 7), now: Duration::ZERO }
    }

    pub(crate) fn tell(&mut self, input: user::Input) -> Vec<user::Output> {
        let mut out = Vec::new();
        self.user.step(self.now, input, &mut out);
        out
    }

    pub(crate) fn pass(&mut self, millis: u64) -> Vec<user::Output> {
        let (end, mut all) = (self.now + ms(millis), Vec::new());
        while let Some(at) = self.user.wake().filter(|at| *at <= end) {
            self.now = at.max(self.now);
            all.extend(self.tell(user::Input::Tick));
        }
        self.now = end;
        all.extend(self.tell(user::Input::Tick));
        all
    }

    /// Asks for lease `number` as request `number`, of these peers, each with these parts, and all of them can be reached.
    pub(crate) fn ask(
        &mut self,
        number: u64,
        peers: &[u8],
        count: u32,
        access: Access,
    ) -> Vec<user::Output> {
        let mut out = self.tell(user::Input::Ask(ask(number, peers, count, access)));
        for one in peers {
            out.extend(self.tell(user::Input::PeerReady { peer: peer(*one) }));
        }
        out
    }

    pub(crate) fn settle(
        &mut self,
        transfer: TransferNumber,
        outcome: Outcome,
    ) -> Vec<user::Output> {
        self.tell(user::Input::Settled { transfer, outcome })
    }

    /// The owner answers a confirm.
    pub(crate) fn judge(&mut self, from: u8, asked: &Confirm, held: bool) -> Vec<user::Output> {
        let why = (!held).then_some(Reason::Expired);
        self.told(from, asked, held, why)
    }

    /// The owner says that a lease had not held, and perhaps why.
    pub(crate) fn told_verdict(
        &mut self,
        from: u8,
        asked: &Confirm,
        why: Option<Reason>,
    ) -> Vec<user::Output> {
        self.told(from, asked, false, why)
    }

    fn told(
        &mut self,
        from: u8,
        asked: &Confirm,
        held: bool,
        why: Option<Reason>,
    ) -> Vec<user::Output> {
        let Confirm { lease, reader, nonce, .. } = *asked;
        let message = ToUser::Verdict(Verdict { lease, reader, nonce, held, why });
        self.tell(user::Input::Message { peer: peer(from), message })
    }

    pub(crate) fn told_ended(
        &mut self,
        from: u8,
        number: u64,
        reason: Reason,
    ) -> Vec<user::Output> {
        let message = ToUser::Ended(Ended { lease: lease(number), reader: reader(1, 0), reason });
        self.tell(user::Input::Message { peer: peer(from), message })
    }

    pub(crate) fn told_parts(
        &mut self,
        from: u8,
        number: u64,
        parts: Vec<Part>,
        total: Option<u32>,
    ) -> Vec<user::Output> {
        let list = PartList { lease: lease(number), reader: reader(1, 0), parts, total };
        self.tell(user::Input::Message { peer: peer(from), message: ToUser::Parts(list) })
    }

    pub(crate) fn told_released(&mut self, from: u8, number: u64) -> Vec<user::Output> {
        let message = ToUser::Released(Released { lease: lease(number), reader: reader(1, 0) });
        self.tell(user::Input::Message { peer: peer(from), message })
    }
}

pub(crate) fn ask(number: u64, peers: &[u8], count: u32, access: Access) -> Ask {
    let source = |one: &u8| Source {
        peer: peer(*one),
        set: Ranks::new([0]).unwrap(),
        data: true,
        parts: parts(count),
        total: Some(count),
    };
    Ask {
        request: RequestNumber(number),
        key: TransferKey::new("r").unwrap(),
        lease: lease(number),
        access,
        fingerprint: None,
        reader: reader(1, 0),
        sources: peers.iter().map(source).collect(),
        deadline: ms(30_000),
        begin: true,
        prove: Prove::Whole,
        before: 0,
        after: 0,
        keeping: user::Keeping::default(),
    }
}

pub(crate) fn posts(out: &[user::Output]) -> Vec<TransferNumber> {
    let post = |output: &user::Output| match output {
        user::Output::Post { transfer, .. } => Some(*transfer),
        _ => None,
    };
    out.iter().filter_map(post).collect()
}

pub(crate) fn confirms(out: &[user::Output]) -> Vec<(Incarnation, Confirm)> {
    let confirm = |output: &user::Output| match output {
        user::Output::Send { peer, message: ToOwner::Confirm(confirm), .. } => {
            Some((*peer, confirm.clone()))
        }
        _ => None,
    };
    out.iter().filter_map(confirm).collect()
}

pub(crate) fn released_to(out: &[user::Output]) -> Vec<Incarnation> {
    let release = |output: &user::Output| match output {
        user::Output::Send { peer, message: ToOwner::Release(_), .. } => Some(*peer),
        _ => None,
    };
    out.iter().filter_map(release).collect()
}

pub(crate) fn is_ready(out: &[user::Output]) -> bool {
    out.iter().any(|output| matches!(output, user::Output::Ready { .. }))
}

/// Why a request failed, if one did.
pub(crate) fn failed(out: &[user::Output]) -> Option<user::Why> {
    out.iter().find_map(|output| match output {
        user::Output::Failed { why, .. } => Some(*why),
        _ => None,
    })
}

pub(crate) fn is_aborted(out: &[user::Output]) -> bool {
    out.iter().any(|output| matches!(output, user::Output::Aborted { .. }))
}
