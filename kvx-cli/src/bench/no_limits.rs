//! No limits to compare with: the crate that has them is not built in.

use kvx_core::Result;

use super::rig::Rig;
use crate::remote::Process;

/// Nothing.
pub(crate) struct Limits;

/// One round of no limits.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LimitRound {
    pub(crate) memcpy: Option<f64>,
    pub(crate) process_vm: Option<f64>,
    pub(crate) process_vm_writev: Option<f64>,
}

impl Limits {
    #[expect(clippy::unnecessary_wraps, reason = "as where there are limits")]
    pub(crate) const fn new(_: &mut Rig<'_>) -> Result<Self> {
        Ok(Self)
    }

    #[expect(
        clippy::unused_self,
        clippy::needless_pass_by_ref_mut,
        reason = "as where there are limits"
    )]
    pub(crate) fn round(&mut self, _: &mut Process, _: u32) -> LimitRound {
        LimitRound::default()
    }
}
