//! Faults that tests plant in the machines, to show that each would be found.

use super::terms::Reason;

/// A fault of the protocol.
#[cfg_attr(
    not(any(test, feature = "sim")),
    expect(unreachable_pub, dead_code, reason = "planted only in tests")
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Plant {
    /// The owner ends a lease at the first confirm, not at the last of the set.
    FreeBeforeConfirm,
    /// The owner counts confirms, so that a doubled one stands for two readers.
    CountNotSet,
    /// The owner answers a confirm that is repeated after the end as if it were new.
    VerdictForgotten,
    /// The owner answers any nonce of a reader that confirmed as it answered the first.
    OwnerIgnoresNonce,
    /// The user takes a verdict with any nonce.
    UserIgnoresNonce,
    /// The owner does not compare the life of the engine in a lease's name: numbers begin anew with each.
    NumbersRestart,
    /// The owner looks at a heartbeat before it looks at the clock.
    LateHoldRevives,
    /// A heartbeat extends a lease beyond its hard deadline.
    HoldBeyondHard,
    /// The user believes, by its own clock, that the lease holds, and does not confirm.
    ClocksCompared,
    /// The user reports a failure before all transfers have settled.
    FailureBeforeSiblings,
    /// A release ends the lease though another attempt is active.
    ReleaseIgnoresAttempt,
    /// The owner forgets what comes before the grant.
    EarlyForgotten,
    /// What ends by confirm and by expiry in the same moment is freed twice.
    DoubleFreeAtTie,
    /// The user reports an abort before all transfers have settled.
    AbortUnpinsEarly,
    /// The owner takes what is said of one epoch for another.
    EpochIgnored,
    /// The owner adds up readers of several attempts.
    SetsMerged,
    /// The owner believes the newest set of an attempt.
    SetReplaced,
    /// The owner frees what it should quarantine.
    QuarantineFreed,
    /// The owner takes a writer whose process is gone for quiescent.
    GoneIsQuiet,
    /// The owner takes every writer for quiescent at the end of a lease.
    WritersIgnored,
    /// The owner lets a second attempt write while the first may still.
    WritersMixed,
    /// The owner tells nobody that a lease was withdrawn.
    EndNotTold,
    /// The owner pushes parts only when they are published.
    LateUserGetsNothing,
    /// The user takes the parts that it knows for all.
    TotalGuessed,
    /// The user draws its nonce when the last transfer is posted.
    ConfirmBeforeSettle,
    /// The user sends a confirm once.
    ConfirmNotRepeated,
    /// The owner lets any peer speak for a reader.
    AnyPeerSpeaks,
    /// The user lets any peer answer.
    AnyPeerAnswers,
    /// The owner publishes a part before its stage is over.
    PublishedBeforeStage,
    /// The owner frees blocks in which a stage still runs.
    FreedUnderStage,
    /// The user does not wait for stages after the transfer.
    ReadyBeforeStage,
    /// The user takes a full queue for a failure.
    BusyIsFailure,
    /// The user writes before the owner has answered.
    WriteUnasked,
    /// A writer says that it is done before its writes have settled.
    ReleaseBeforeSettled,
    /// The user forgets its deadline.
    DeadlineForgotten,
    /// A peer that fails takes all requests with it.
    OneFailsAll,
    /// The user takes the end of a lease for the answer to its confirm.
    EndBeatsVerdict,
    /// The user does not hold what is not admitted.
    QueueNotHeld,
    /// The user stops holding when it begins to read.
    ReadNotHeld,
    /// The user never severs.
    NeverSevers,
    /// The user is ready when the first source is proven.
    OneSourceIsAll,
    /// The user takes a part for proven that settled after the nonce was drawn.
    LatePartProven,
    /// The user goes on writing over a new connection.
    WritesOverNewConnection,
    /// The owner does not look whether a user reads or writes.
    AccessIgnored,
    /// The owner does not compare what a user reads or writes with what it granted.
    FingerprintIgnored,
    /// The owner gives everybody who comes late the same reason.
    ReasonGuessed,
}

#[cfg(any(test, feature = "sim"))]
impl Plant {
    /// All of them.
    pub const ALL: [Self; 46] = [
        Self::FreeBeforeConfirm,
        Self::CountNotSet,
        Self::VerdictForgotten,
        Self::OwnerIgnoresNonce,
        Self::UserIgnoresNonce,
        Self::NumbersRestart,
        Self::LateHoldRevives,
        Self::HoldBeyondHard,
        Self::ClocksCompared,
        Self::FailureBeforeSiblings,
        Self::ReleaseIgnoresAttempt,
        Self::EarlyForgotten,
        Self::DoubleFreeAtTie,
        Self::AbortUnpinsEarly,
        Self::EpochIgnored,
        Self::SetsMerged,
        Self::SetReplaced,
        Self::QuarantineFreed,
        Self::GoneIsQuiet,
        Self::WritersIgnored,
        Self::WritersMixed,
        Self::EndNotTold,
        Self::LateUserGetsNothing,
        Self::TotalGuessed,
        Self::ConfirmBeforeSettle,
        Self::ConfirmNotRepeated,
        Self::AnyPeerSpeaks,
        Self::AnyPeerAnswers,
        Self::PublishedBeforeStage,
        Self::FreedUnderStage,
        Self::ReadyBeforeStage,
        Self::BusyIsFailure,
        Self::WriteUnasked,
        Self::ReleaseBeforeSettled,
        Self::DeadlineForgotten,
        Self::OneFailsAll,
        Self::EndBeatsVerdict,
        Self::QueueNotHeld,
        Self::ReadNotHeld,
        Self::NeverSevers,
        Self::OneSourceIsAll,
        Self::LatePartProven,
        Self::WritesOverNewConnection,
        Self::AccessIgnored,
        Self::FingerprintIgnored,
        Self::ReasonGuessed,
    ];
}

/// The fault of one machine: none, but where one is planted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Planted {
    #[cfg(any(test, feature = "sim"))]
    plant: Option<Plant>,
}

#[cfg(any(test, feature = "sim"))]
impl Planted {
    pub(super) const fn new(plant: Plant) -> Self {
        Self { plant: Some(plant) }
    }

    pub(super) fn has(&self, plant: Plant) -> bool {
        self.plant == Some(plant)
    }
}

#[cfg(not(any(test, feature = "sim")))]
#[expect(clippy::unused_self, reason = "it is the same call where faults can be planted")]
impl Planted {
    #[inline(always)]
    pub(super) const fn has(&self, _: Plant) -> bool {
        false
    }
}

impl Planted {
    /// Whether nobody looks whether this is a reason to refuse what a user says.
    pub(super) fn ignores(&self, why: Reason) -> bool {
        match why {
            Reason::Access => self.has(Plant::AccessIgnored),
            Reason::Ticket => self.has(Plant::FingerprintIgnored),
            _ => false,
        }
    }
}
