//! Faults that tests plant, to see that the simulation finds them. Not one of them is there in what is built otherwise.

/// What is done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Another life of a rank does not end the one before.
    KeepsOldLife,
    /// The result of a step that was given up is thrown away, with its connection.
    LosesOrphans,
    /// A connection of a peer that is gone is not ended.
    NeverDisconnects,
    /// A peer that says goodbye is disconnected twice.
    DisconnectsTwice,
    /// A want has no deadline.
    WaitsForEver,
    /// A failed attempt is not repeated.
    NeverRetries,
    /// Two wants for one engine are two attempts.
    MeetsTwice,
    /// Routes outlive their peers.
    KeepsRoutes,
    /// A connection that broke before its step was answered is taken.
    ForgetsEarlyDowns,
    /// What has changed since cards were fetched is passed over.
    IgnoresChanges,
    /// A peer without a session is kept for ever.
    KeepsTheLonely,
    /// What waits for a connection that ends is not woken.
    MeetsWhileEnding,
}

#[cfg(test)]
impl Fault {
    /// All of them.
    pub(super) const ALL: &[Self] = &[
        Self::KeepsOldLife,
        Self::LosesOrphans,
        Self::NeverDisconnects,
        Self::DisconnectsTwice,
        Self::WaitsForEver,
        Self::NeverRetries,
        Self::MeetsTwice,
        Self::KeepsRoutes,
        Self::ForgetsEarlyDowns,
        Self::IgnoresChanges,
        Self::KeepsTheLonely,
        Self::MeetsWhileEnding,
    ];
}
